"""The command of a pod in the built image, with the archive of the code as the SDK makes it; skipped without one."""

import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flyte.io import Dir

from flyte2 import mnist
from flyte_ddp.data.prepared import prepared
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.commands import ROOT, same
from tests.flyte2.pod import Pod2, weights
from tests.object_storage import object_storage
from tests.test_image import image  # noqa: F401 a fixture

ARCHIVE = """if True:
    import asyncio
    from pathlib import Path
    from flyte._code_bundle import build_code_bundle
    from flyte2 import mnist
    print(asyncio.run(build_code_bundle(Path.cwd(), dryrun=True, additional_files=mnist.training.include)).tgz)
"""


class ImagePod(Pod2):
    """A pod that is a container, with the network of this machine."""

    def __init__(self, name, *given, **more):
        """name: of the image."""
        super().__init__(*given, **more)
        self.container = f"pod-{secrets.token_hex(4)}"
        variables = [f"--env={name}={value}" for name, value in self.environment.items()]
        self.before = ["docker", "run", "--rm", f"--name={self.container}", "--network=host", *variables, name]

    def end(self, process):
        subprocess.run(["docker", "kill", self.container], capture_output=True)


@pytest.fixture(scope="module")
def archive():
    done = subprocess.run([sys.executable, "-c", ARCHIVE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.split()[-1])


def test_a_killed_pod_comes_back_and_ends_with_the_same_bits(image, archive, small_data):  # noqa: F811
    with object_storage() as storage:
        storage.objects["bucket/code.tgz"] = archive.read_bytes()
        for file in small_data.iterdir():
            storage.objects[f"bucket/small/{file.name}"] = file.read_bytes()
        data = Dir(path="s3://bucket/small", hash=prepared.read_description(small_data).digest)
        hp = Hyperparameters(epochs=4, batch_size=16, precision="float32")
        values = {"hp": hp, "data": data, "options": RunOptions(checkpoint_seconds=0.2)}

        def pod(action):
            more = {"action": action, "environment": {"DDP_POD_GPUS": "0"}, "code": "s3://bucket/code.tgz"}
            return ImagePod(image, mnist.train, values, storage, **more)

        whole, killed, again = pod("whole"), pod("killed"), pod("killed")
        assert whole.finish() == 0, whole.log
        killed.kill_when(lambda objects: "bucket/run/killed/1/_flytecheckpoints/checkpoint" in objects)
        assert again.finish() == 0, again.log
        assert "resuming from the checkpoint" in again.log
        assert same(weights(storage, again.outputs()), weights(storage, whole.outputs()))


def test_the_pod_of_a_run_asks_for_the_version_that_was_registered(image, archive):  # noqa: F811
    """Else what is cached would never be found, or found where it does not belong."""
    program = "from flyte2 import mnist; print(*(task.cache.get_version() for task in (mnist.train, mnist.prepare)))"
    command = ["docker", "run", "--rm", "--interactive", "--network=none", image, "sh", "-ec"]
    unpacked = [*command, f"tar xz && exec python -c '{program}'"]
    done = subprocess.run(unpacked, input=archive.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    here: list[Any] = [mnist.train.cache, mnist.prepare.cache]
    assert done.stdout.decode().split() == [cache.get_version() for cache in here]
