"""Every command of the README and of the pages below is run here, or stands in NOT_RUN with the reason."""

import os
import re
import shutil
from pathlib import Path

import pytest

from flyte_ddp.data.prepared import prepared
from flyte_ddp.data.prepared.writer import write_prepared
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import write_folder
from tests.commands import typed
from tests.environment import make_environment

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = "needs a cluster or a container engine; tests/test_registration.py and test_image.py go as far as they can"
SAME_BITS = "tests/engine/virtual_ranks compares digests of less training"
DIGITS = '{"dataset": "digits", "epochs": 3, "virtual_ranks": 12}'
SWEEP = '{"values": {"learning_rate": [0.1, 0.2], "sgd_momentum": [0.8, 0.9]}}'
MEASURE = "PYTHONPATH=. pyflyte run examples/measure/"
# Run by another test, with smaller settings
ELSEWHERE = {
    f"{MEASURE}inference.py inference_wf --network resnet9_small --batch_sizes '[1, 32, 512]'": "tests/test_measure.py",
    f"{MEASURE}loading.py loading_wf --workers '[0, 1, 2, 4]'": "tests/test_measure.py",
    f"{MEASURE}devices.py devices_wf --devices '[\"cpu\"]'": "tests/test_measure.py",
    f"pyflyte run workflows/sweep.py sweep_wf --hp '{{\"epochs\": 1}}' --sweep '{SWEEP}'": "tests/sweep",
    'python -m workflows.without_flyte --output alone --hp \'{"dataset": "digits", "epochs": 1}\'': (
        "tests/test_without_flyte.py"
    ),
    "torchrun --nproc-per-node 2 -m workflows.without_flyte --output ranks --hp "
    '\'{"dataset": "digits", "epochs": 1}\'': "tests/test_without_flyte.py",
    'flyte run --local flyte2/sweep.py main --sweep \'{"values": {"learning_rate": [0.05, 0.1]}}\' --hp '
    "'{\"epochs\": 1}'": "tests/flyte2/test_local.py",
    "make dry-run2 IMAGE=registry.example.org/me/trainer:1": "tests/flyte2/test_environment.py",
    "flyte run --local flyte2/mnist.py main --hp '{\"epochs\": 1}'": "tests/flyte2/test_local.py",
    "flyte run --local flyte2/promote.py main --place models": "tests/flyte2/test_local.py",
    "flyte run --local flyte2/inference.py main --model_state models/versions/*/model.pt --shards 2": (
        "tests/flyte2/test_local.py"
    ),
    "pyflyte run workflows/cifar10.py cifar10_wf": "tests/test_other_datasets.py",
    "pyflyte run workflows/image_folder.py image_folder_wf": "tests/test_image_folder.py",
    "pyflyte run workflows/export.py export_folder_wf": "tests/export/test_folder.py",
    "pip install -e .": "tests/new/test_new.py, though not as editable",
    "make dry-run IMAGE=registry.example.org/me/trainer:1": "tests/attempt/test_webhook.py",
    'pyflyte run workflows/sweep.py sweep_wf --hp \'{"epochs": 4}\' --sweep \'{"values": {"learning_rate": '
    '[0.05, 0.1, 0.2, 0.4]}, "reduction_factor": 4}\'': "tests/sweep/test_halving.py",
}
NOT_RUN = {
    **ELSEWHERE,
    "pip install matplotlib": "it would find what the lock files install",
    f"""python -m workflows.without_flyte --hp '{DIGITS}' --options '{{"nproc": 3}}' --output trained""": SAME_BITS,
    f"""python -m workflows.without_flyte --hp '{DIGITS}' --options '{{"nproc": 1}}' --output alone""": SAME_BITS,
    "make image IMAGE=registry.example.org/me/trainer:1": CLUSTER,
    "docker push registry.example.org/me/trainer:1": CLUSTER,
    "make register IMAGE=registry.example.org/me/trainer:1 CLUSTER_CONFIG=~/.flyte/config.yaml": CLUSTER,
    "make smoke IMAGE=registry.example.org/me/trainer:1 CLUSTER_CONFIG=~/.flyte/config.yaml": CLUSTER,
    "FLYTE_PLATFORM_URL=dns:///flyte.example.org pyflyte --config flyte.config register workflows": CLUSTER,
    "DDP_PROFILE=sandbox make register IMAGE=localhost:30000/trainer:1 CLUSTER_CONFIG=~/.flyte/config-sandbox.yaml": (
        CLUSTER
    ),
    "pyflyte --config flyte.config run --remote workflows/mnist.py pytorch_training_wf": CLUSTER,
    "pyflyte run --remote workflows/mnist.py pytorch_training_wf --hp '{\"epochs\": 10}' --options "
    '\'{"resume_from": "s3://my-bucket/metadata/.../_flytecheckpoints"}\'': CLUSTER,
    "flyte run --image trainer=registry.example.org/me/trainer:1 flyte2/mnist.py main --hp '{\"epochs\": 1}'": CLUSTER,
    "flyte deploy --image trainer=registry.example.org/me/trainer:1 flyte2/mnist.py workflow": CLUSTER,
    "DDP_GPUS=8 DDP_NNODES=4,2 flyte run --image trainer=registry.example.org/me/trainer:1 flyte2/multinode.py main": (
        CLUSTER
    ),
    "DDP_PROMOTE_TO=s3://bucket/mnist flyte deploy --image trainer=registry.example.org/me/trainer:1 "
    "flyte2/promote.py workflow": CLUSTER,
    "flyte update trigger nightly promote.main --activate": CLUSTER,
    "flyte deploy --image trainer=registry.example.org/me/trainer:1 flyte2/inference.py workflow": CLUSTER,
    "flyte update trigger on_promotion inference.main --activate": CLUSTER,
    "make smoke2 IMAGE=registry.example.org/me/trainer:1 CLUSTER_CONFIG=~/.flyte/config.yaml": CLUSTER,
    "flytectl create execution -p flytesnacks -d development --execFile digits.yaml": CLUSTER,
    "flytectl update launchplan nightly -p flytesnacks -d development --version VERSION --activate --force": CLUSTER,
    "DDP_NOTIFY=email:me@example.org DDP_WEBHOOK_SECRET=hooks/url make dry-run "
    "IMAGE=registry.example.org/me/trainer:1": "tests/attempt/test_webhook.py sets these variables",
}
PAGES = ("README.md", "docs/reference.md", "docs/workflows.md", "docs/on-a-cluster.md", "docs/flyte-2.md")
TEXT = "\n".join((ROOT / page).read_text() for page in PAGES)
SAMPLES = 64  # of each split: the commands have to work, not to learn
BLOCKS = re.findall(r"^```(?:sh|console)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines of sh blocks, and those behind a prompt in console blocks, once each; continued lines joined."""
    found: list[str] = []
    for block in BLOCKS:
        lines = block.replace("\\\n", " ").splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        found += prompted or ([] if block.startswith("+ ") else lines)
    found = [" ".join(line.split()) for line in found if line.strip() and not line.startswith("#")]
    return [*dict.fromkeys(found)]


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> dict[str, str]:
    """A copy of the project, an environment of its own, and small datasets in place of the real ones.

    The environment has what this one has, and the project's make targets find it complete.
    """
    place = tmp_path_factory.mktemp("readme")
    project = place / "project"
    ignored = shutil.ignore_patterns(".venv*", ".tools", ".git", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, project, ignore=ignored)
    make_environment(project / ".venv")
    for stamp in ("run.stamp", "dev.stamp"):
        (project / ".venv" / stamp).touch()

    digits, data = prepare("digits"), place / "data"
    (images, labels), (test_images, test_labels) = (prepared.open_split(digits, name) for name in ("train", "test"))
    names = [str(digit) for digit in range(10)]
    for name, channels in {"mnist": 1, "fashion_mnist": 1, "cifar10": 3}.items():
        train, test = (pictures.repeat(channels, axis=1) for pictures in (images[:SAMPLES], test_images[:SAMPLES]))
        write_prepared(data / "prepared" / name, name, names, train, labels[:SAMPLES], test, test_labels[:SAMPLES])
    write_folder(data / "digit_images", names, images[:SAMPLES], labels[:SAMPLES])
    return {
        **dict.fromkeys(("MAKEFLAGS", "MFLAGS", "ARGS"), ""),  # `make test ARGS=...` hands ARGS down to every make
        "HOME": str(place),
        "DDP_DATA_DIR": str(data),
        "DDP_RUNS_DIR": str(place / "runs"),
        "PATH": f"{project}/.venv/bin:{os.environ['PATH']}",
        "PROJECT": str(project),
        "PYTHONPATH": str(project),  # instead of an installation
    }


def test_the_pages_have_commands():
    assert len(commands()) > 30
    assert set(NOT_RUN) <= set(commands()), "NOT_RUN names a command that no page has"


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in commands() if command not in NOT_RUN])
def test_a_command_works(user, command):
    project = Path(user["PROJECT"])
    if command.startswith("make run ARGS="):  # what make would type, in this process; `make run` has one of its own
        shown = typed(command.replace("make", "make --dry-run --no-print-directory", 1), project, user).stdout
        command = shown.rpartition('/bin:$PATH" ')[2]
        assert command.startswith("pyflyte run workflows/mnist.py pytorch_training_wf --hp ")
    typed(command, project, user)
