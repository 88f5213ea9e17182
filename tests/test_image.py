"""The image, built and run for real where there is a docker daemon; without one, what its files promise."""

import json
import os
import re
import shutil
import subprocess

import pytest

from scripts.dry_run import ROOT
from tests.pod import container_of, package

NAME = "flyte-ddp-training:test"


def docker(*arguments, timeout=120):
    return subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def image():
    """DDP_TEST_IMAGE says that there is a daemon, and time for some minutes and some GB: or names a built image."""
    wanted = os.environ.get("DDP_TEST_IMAGE")
    if not wanted:
        pytest.skip("takes minutes and GB: set DDP_TEST_IMAGE to a built image's name, or to build")
    if not shutil.which("docker") or docker("info").returncode:
        pytest.skip("needs a docker daemon")
    if wanted != "build":
        return wanted
    made = docker("build", "--network", "host", "--tag", NAME, ".", timeout=1800)
    assert made.returncode == 0, made.stderr
    return NAME


def run(image, *command, timeout=300):
    """Without any network, as an arbitrary pod might be."""
    done = docker("run", "--rm", "--network", "none", image, *command, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_whole_workflow_runs_without_a_network(image):
    shown = run(image, "pyflyte", "run", "workflows/mnist.py", "pytorch_training_wf", "--hp", '{"dataset": "digits"}')
    accuracies = re.search(r"epoch_accuracies=\[([^\]]*)\]", shown)
    assert accuracies, shown
    assert float(accuracies.group(1).split(", ")[-1]) >= 0.97


def test_every_registered_task_is_found(image):
    """By the very words with which a pod looks for it."""
    words = {}
    for name, task in package().tasks.items():
        arguments = list(container_of(task).args)
        words[name] = arguments[arguments.index("--resolver") + 1 :]
    program = """if True:
        import json, re, sys
        from flytekit.tools.module_loader import load_object_from_module
        for name, (resolver, _, *arguments) in json.loads(sys.argv[1]).items():
            found = load_object_from_module(resolver)
            found = found() if isinstance(found, type) else found  # a map task's has to be made
            found = found.load_task(loader_args=arguments).name
            # a map task's name ends in a hash of inputs that a pod does not need
            assert re.sub("[0-9a-f]{32}", "", found) == re.sub("[0-9a-f]{32}", "", name), (found, name)
    """
    run(image, "python", "-c", program, json.dumps(words))


def test_nothing_is_compiled_at_the_start_of_a_pod(image):
    """Whatever Python would look for in vain, each pod would compile again, or write into its layer."""
    program = """if True:
        import os, sys
        import flytekit.bin.entrypoint, torch, workflows.mnist, flyte_ddp.engine.worker
        files = [getattr(module, "__cached__", None) for module in list(sys.modules.values())]
        print(*(file for file in files if isinstance(file, str) and not os.path.exists(file)))
    """
    assert not run(image, "python", "-B", "-c", program).split()


def test_flytekits_open_sessions_are_not_errors(image):
    program = (
        "import logging; log = logging.getLogger('flytekit'); "
        "print(*(bool(log.filter(logging.makeLogRecord({'msg': text}))) for text in "
        "('caught exception: Unclosed client session', 'caught exception: another one')))"
    )
    assert run(image, "python", "-c", program) == "False True\n"


def test_nothing_in_it_that_should_not_be(image):
    assert run(image, "id", "--user").strip() != "0"
    found = run(image, "sh", "-c", "ls /root; command -v gcc cc make || true").split()
    assert found == ["flyte_ddp", "workflows"]
    history = docker("history", "--no-trunc", image).stdout
    assert not re.search(r"WANDB_API_KEY|token|password", history, re.IGNORECASE)


def test_build_context_is_code_only():
    kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert kept == ["!requirements.txt", "!flyte_ddp", "!workflows"]
    copied = re.findall(r"^COPY (?:--\S+ )?(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert copied == ["requirements.txt", "flyte_ddp", "workflows"]
