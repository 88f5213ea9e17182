"""One attempt at a script on a platform that is no more than folders.

python -m tests.script.attempt ROOT NUMBER RANKS SCRIPT …
"""

import json
import os
import sys
from pathlib import Path

from flyte_ddp.report.console import show_output
from flyte_ddp.script import mirror
from flyte_ddp.script.training import CommonScriptTraining
from flyte_ddp.settings import RunOptions
from tests.attempt.folders import Folders


class Node(Folders):
    """A platform whose nodes have folders of their own."""

    def working_folder(self):
        folder = super().working_folder() / os.environ.get("GROUP_RANK", "")
        folder.mkdir(exist_ok=True)
        return folder


class FolderScript(CommonScriptTraining):
    downloaded = downloaded_once = staticmethod(lambda given: given)  # type: ignore[assignment]

    def make_outputs(self, trained):
        figures = trained.results[0].figures
        return {"figures": figures, "files": sorted(path.name for path in trained.model.parent.iterdir())}


def main(root: str, number: str, ranks: str, script: str, *arguments: str) -> None:
    mirror.QUIET_SECONDS = 0.3
    training = FolderScript(script, arguments)
    training.platform = Node(Path(root), int(number))
    show_output()
    run = training.run_as_rank if "WORLD_SIZE" in os.environ else training.run
    print(json.dumps(run(RunOptions(nproc=int(ranks), tracking="off"), [])))


if __name__ == "__main__":
    main(*sys.argv[1:])
