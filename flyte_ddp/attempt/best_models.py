"""The weights of the best evaluations so far, beside a checkpoint in the platform's storage."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.attempt.storage_folder import StorageFolder
from flyte_ddp.manifest import models_beside

LIST = "list.json"  # the file in the storage that maps names beside the checkpoint to the storage's files 0, 1, 2, …


class StoredModels(StorageFolder):
    """The best models beside a checkpoint on this machine, and beside its copy in the storage.

    Each model is uploaded once, before the first checkpoint that needs it, and again if its file is replaced. Nothing
    is removed from the storage, but a file's name is used again once the stored checkpoint does without the file. So
    there are at most twice as many files as models kept.
    """

    def __init__(self, platform: Platform, path: Path, url: str):
        """Begin without models in the storage."""
        folder = models_beside(path)
        super().__init__(platform, f"{url}/{folder.name}", folder)
        self._stored: dict[str, str] = {}  # the storage's files that its list may name, by names beside the checkpoint
        self._versions: dict[str, tuple[int, ...]] = {}  # of the files beside the checkpoint, as they are stored

    def fetch_all(self) -> None:
        """Download the best models of the stored checkpoint into the folder of models beside the local checkpoint.

        A list in the storage names the models. Without a list, all files *.pt are copied if the storage folder is on
        this machine. Models that the storage lacks are left out, because the ranks can do without them. A later
        put_all() uploads a listed model again only if it was missing or has changed.

        Raises:
            Exception: The storage fails.
        """
        self._stored = _read_list(self.fetch_text(LIST))
        # If ranks have left the checkpoint on this machine, there is no list, and the files have their own names
        own = {model.name: model.name for model in Path(self.url.removeprefix("file://")).glob("*.pt")}
        for name, file in [*(self._stored or own).items()]:
            try:
                self.fetch(file, self.folder / name)
                self._versions[name] = file_version(self.folder / name)
            except FileNotFoundError:
                self._stored.pop(name, None)  # the next model of this name is to be uploaded

    def put_all(self, models: Path, put_checkpoint: Callable[[], None]) -> None:
        """Upload a folder's models NAME.pt, and then the checkpoint.

        A model that the storage has is uploaded again only if its file on this machine has been replaced.

        While the checkpoint is uploaded, the storage's list of models names the old and the new models, and afterwards
        only the new ones. So the list always names every model that the stored checkpoint needs.

        Args:
            models: the folder on this machine.
            put_checkpoint: uploads the checkpoint.

        Raises:
            OSError: An upload fails. The next call does not repeat the uploads that succeeded.
        """
        names = sorted(model.name for model in models.glob("*.pt"))
        for name in names:
            newest = file_version(models / name)
            if name not in self._stored or newest != self._versions.get(name):
                file = unused(self._stored.values())
                self.put(models / name, file)
                self._stored[name] = file
                self._versions[name] = newest
        if self._stored:
            self.put_text(json.dumps(self._stored), LIST)
        put_checkpoint()
        needed = {name: self._stored[name] for name in names}
        if needed != self._stored:
            self.put_text(json.dumps(needed), LIST)
            self._stored = needed


def file_version(file: Path) -> tuple[int, ...]:
    """Return numbers that are others once the file has been replaced, and that a hard link has, too."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def unused(names: Iterable[str]) -> str:
    """Return the first of the names 0, 1, 2, … that is not among these."""
    taken = {*names}
    return next(name for name in map(str, itertools.count()) if name not in taken)


def _read_list(text: str) -> dict[str, str]:
    """Parse the storage's list of models, and return the name of each model's stored file by its local name.

    Local names are NAME.pt, beside the checkpoint. Names of stored files are "0", "1" and so on. Entries of any other
    form are dropped. A text that is no JSON object gives an empty dict.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {
        name: file
        for name, file in pairs
        if Path(name).name == name and name.endswith(".pt") and isinstance(file, str) and file.isdecimal()
    }
