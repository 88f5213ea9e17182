"""A platform that is no more than folders. Without torch, which a process that starts ranks does not import either."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path


class FolderError(Exception):
    def __init__(self, failure, message):
        super().__init__(message)
        self.failure = failure


@dataclass
class Folders:
    """A platform that stores each attempt in a folder of its own below root."""

    root: Path
    attempt: int = 0
    pages: list[str] = field(default_factory=list)
    download_errors = ()

    def is_local(self):
        return False

    def working_folder(self):
        folder = self.root / f"pod-{self.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def earlier_attempts(self):
        return self.attempt

    def execution(self):
        return "the-execution", ""

    def logs_url(self):
        return f"{self.root}/{self.attempt}/logs"

    def previous_logs_url(self):
        return f"{self.root}/{self.attempt - 1}/logs" if self.attempt else ""

    def checkpoint_url(self):
        return f"{self.root}/{self.attempt}/checkpoints"

    def previous_checkpoint_url(self):
        return f"{self.root}/{self.attempt - 1}/checkpoints" if self.attempt else ""

    def get(self, url, path):
        shutil.copyfile(url, path)

    def put(self, path, url):
        Path(url).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, url)

    def storage_options(self, protocol):
        return {}

    def publisher(self, title):
        return self.pages.append

    def error(self, failure, message):
        return FolderError(failure, message)


class OnFolders:
    """What a training of Folders makes of its data and its outcome: nothing."""

    @staticmethod
    def downloaded(given):
        return given

    downloaded_once = downloaded

    def make_outputs(self, trained):
        return trained
