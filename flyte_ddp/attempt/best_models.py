"""The weights of the best evaluations so far, beside a checkpoint in the platform's storage."""

import itertools
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flyte_ddp.attempt.platform import Platform
from flyte_ddp.manifest import models_beside
from flyte_ddp.whole_files import temporary_beside

LIST = "list.json"  # the file in the storage that maps names beside the checkpoint to the storage's files 0, 1, 2, …


def get_file(platform: Platform, url: str, path: Path) -> None:
    """Download a file, whole or not at all."""
    beside = temporary_beside(path)
    try:
        platform.get(url, beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


class StoredModels:
    """The best models beside the checkpoint in a folder of the storage.

    Each model is uploaded once, before the first checkpoint that needs it. Nothing is removed from the storage, but a
    file's name is used again once the stored checkpoint does without the file. So there are at most twice as many files
    as models kept.
    """

    def __init__(self, platform: Platform, folder: str, path: Path):
        """Remember where the models are.

        Args:
            platform: the platform.
            folder: the folder of the checkpoint in the storage.
            path: the checkpoint on this machine.
        """
        self._platform = platform
        self._path = path
        self._url = f"{folder}/{models_beside(path).name}"
        self._stored: dict[str, str] = {}  # names in the storage, by names beside the checkpoint
        self._listed: dict[str, str] | None = {}  # the content of the storage's list; None if it is unknown

    def get(self) -> None:
        """Download the models that the storage has for its checkpoint, and put them beside the local checkpoint.

        A model that is missing in the storage is left out, because the ranks can do without it.
        """
        list_path = self._path.with_name(LIST)
        local = models_beside(self._path)
        try:
            get_file(self._platform, f"{self._url}/{LIST}", list_path)
        except FileNotFoundError:
            # If ranks have left the checkpoint on this machine, there is no list, and the files have their own names
            for model in Path(self._url.removeprefix("file://")).glob("*.pt"):
                local.mkdir(exist_ok=True)
                get_file(self._platform, f"{self._url}/{model.name}", local / model.name)
            return
        self._stored = self._listed = _read_list(list_path)
        local.mkdir(exist_ok=True)
        for name, file in self._stored.items():
            with suppress(FileNotFoundError):  # the ranks can do without a missing model
                get_file(self._platform, f"{self._url}/{file}", local / name)

    def put(self, folder: Path, put_checkpoint: Callable[[], None]) -> None:
        """Upload the models that the storage lacks, and then the checkpoint.

        The list of models names the old and the new ones while the checkpoint is uploaded, and only the new ones
        afterwards. So the list has every model that the stored checkpoint needs, whenever the process is killed.

        Args:
            folder: a folder with all models that the checkpoint needs, NAME.pt.
            put_checkpoint: uploads the checkpoint.
        """
        before = self._stored
        free = (file for file in map(str, itertools.count()) if file not in before.values())
        now = {file.name: before.get(file.name) or next(free) for file in sorted(folder.glob("*.pt"))}
        for name in now.keys() - before.keys():
            self._platform.put(folder / name, f"{self._url}/{now[name]}")
        self._list(folder, {**before, **now})
        put_checkpoint()
        self._list(folder, now)

    def _list(self, folder: Path, stored: dict[str, str]) -> None:
        if stored == self._listed:
            return
        self._stored = {**self._stored, **stored}
        self._listed = None
        (folder / LIST).write_text(json.dumps(stored))
        self._platform.put(folder / LIST, f"{self._url}/{LIST}")
        self._stored = self._listed = stored


def _read_list(path: Path) -> dict[str, str]:
    """Read the storage's list of models, and drop entries that this library would not have written.

    The file may be damaged, or somebody else's.

    Args:
        path: the downloaded list, a JSON file.

    Returns:
        The files in the storage ("0", "1", …) by the models' names beside the checkpoint (NAME.pt). It is empty if
        the file is no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    pairs = content.items() if isinstance(content, dict) else ()
    return {
        name: file
        for name, file in pairs
        if Path(name).name == name and name.endswith(".pt") and isinstance(file, str) and file.isdecimal()
    }
