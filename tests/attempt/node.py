"""A rank of a training on many nodes, which torchrun has started, on a platform that is no more than folders; killed
with its node, if asked, just before an operation on a file."""

import json
import os
import shutil
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path

from flyte_ddp.settings import RunOptions
from flyte_ddp.whole_files import temporary_beside
from tests.attempt.folders import Folders
from tests.attempt.test_sharded_checkpoints import Sharded
from tests.engine.probe_recipes import Settings

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree")


class Pods(Folders):
    """Each rank's working folder is its own, and files appear in the storage whole, as in that of objects."""

    @cache  # noqa: B019 there is one
    def working_folder(self):
        return Path(tempfile.mkdtemp())

    def put(self, path, url):
        Path(url).parent.mkdir(parents=True, exist_ok=True)
        beside = temporary_beside(Path(url))
        shutil.copyfile(path, beside)
        os.replace(beside, url)

    __hash__ = object.__hash__


def kill_before(operation: int, stored: Path) -> None:
    """Kills this rank and its agent before so many operations on checkpoints' files, once there is one in storage."""
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event in OPERATIONS and "checkpoint" in str(arguments[0]) and stored.exists():
            count += 1
            if count == operation:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def main() -> None:
    given = json.loads(sys.argv[1])
    platform = Pods(Path(given["root"]), given["attempt"])
    if os.environ["RANK"] == given["victim"]:
        kill_before(given["operation"], Path(platform.checkpoint_url(), "checkpoint"))
    options = RunOptions(sharding="full", checkpoint_seconds=0, tracking="off", loader_workers=0, timeout_seconds=120)
    trained = Sharded(platform).run_as_rank(Settings(**given["settings"]), options)
    if trained:
        platform.put(trained.model, str(platform.root / "model.pt"))


if __name__ == "__main__":
    main()
