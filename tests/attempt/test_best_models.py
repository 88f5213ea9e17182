"""The best evaluations' weights in a platform's storage fit the checkpoint there, whatever happens to an upload."""

import itertools
import shutil
from types import SimpleNamespace

import pytest

from flyte_ddp.attempt.best_models import StoredModels
from flyte_ddp.attempt.checkpoints import checkpoint_store
from flyte_ddp.events import CheckpointWritten
from flyte_ddp.manifest import models_beside
from flyte_ddp.whole_files import write_whole
from tests.attempt.folders import Folders
from tests.attempt.test_sharded_checkpoints import Watched

BEST = {1: (1,), 2: (1, 2), 3: (3, 2), 4: (3, 4), 5: (5, 4), 6: (5, 6)}  # kept after each evaluation


def written(store, number):
    """What rank 0 leaves after an evaluation: models, then the checkpoint, then without those that it does not need."""
    folder = models_beside(store.path)
    folder.mkdir(exist_ok=True)
    if number in BEST[number]:
        write_whole(folder / f"key-{number}.pt", b"weights of %d" % number)
    write_whole(store.path, b"%d" % number)
    for file in folder.glob("*.pt"):
        if int(file.stem.removeprefix("key-")) not in BEST[number]:
            file.unlink()
    store.on_checkpoint_written(CheckpointWritten(0, number, str(store.path), 0.0, 0.0))


def whole(path):
    """The number of the checkpoint at the path, 0 without one; all that it needs is there."""
    number = int(path.read_bytes()) if path.exists() else 0
    for one in BEST.get(number, ()):
        assert (models_beside(path) / f"key-{one}.pt").read_bytes() == b"weights of %d" % one
    return number


def stored(folder):
    return sorted(file.name for file in (folder / "checkpoints" / "checkpoint-best").iterdir())


def test_each_attempt_begins_with_those_of_the_one_before(tmp_path):
    for attempt in range(6):
        with checkpoint_store(Folders(tmp_path, attempt), "key", resume=True) as store:
            assert whole(store.path) == attempt
            written(store, attempt + 1)
    assert len(stored(tmp_path / "5")) <= 5, "the list, and twice two files"


def test_one_attempt_uploads_each_once_and_uses_names_again(tmp_path):
    platform, puts = Watched(tmp_path), []
    platform.watch = lambda url: puts.append(url.rpartition("/")[2])
    for number in BEST:
        with checkpoint_store(platform, "key", resume=True) as store:
            assert whole(store.path) == number - 1
            written(store, number)
        shutil.rmtree(tmp_path / "pod-0")  # as it is when the pod starts again
    assert len([name for name in puts if name.isdecimal()]) == len(BEST)
    assert {*stored(tmp_path / "0")} <= {"0", "1", "2", "3", "list.json"}


def test_one_process_uses_names_again_too(tmp_path):
    platform = Folders(tmp_path, 0)
    path = platform.working_folder() / "checkpoint"
    models = StoredModels(platform, path, platform.checkpoint_url())
    store = SimpleNamespace(path=path, on_checkpoint_written=lambda _: models.put_all(models.folder, lambda: None))
    for number in BEST:
        written(store, number)
    assert {*stored(tmp_path / "0")} <= {"0", "1", "2", "3", "list.json"}


def test_a_model_that_the_storage_has_lost_is_uploaded_again_under_its_name(tmp_path):
    platform = Watched(tmp_path)
    with checkpoint_store(platform, "key", resume=True) as store:
        written(store, 1)
    shutil.rmtree(tmp_path / "pod-0")
    (tmp_path / "0" / "checkpoints" / "checkpoint-best" / "0").unlink()
    with checkpoint_store(platform, "key", resume=True) as store:
        written(store, 1)
    shutil.rmtree(tmp_path / "pod-0")
    with checkpoint_store(platform, "key", resume=True) as store:
        assert whole(store.path) == 1


def test_a_model_that_is_written_again_is_uploaded_again(tmp_path):
    """As where an evaluation is done again from an earlier checkpoint, on a device that rounds otherwise."""
    for weights in (b"first", b"other"):
        with checkpoint_store(Folders(tmp_path), "key", resume=True) as store:
            models_beside(store.path).mkdir(exist_ok=True)
            write_whole(models_beside(store.path) / "key-1.pt", weights)
            write_whole(store.path, weights)
        shutil.rmtree(tmp_path / "pod-0")
    with checkpoint_store(Folders(tmp_path), "key", resume=True) as store:
        assert (models_beside(store.path) / "key-1.pt").read_bytes() == b"other"


@pytest.mark.parametrize("number", [3, 4])
def test_an_upload_that_ends_anywhere_leaves_what_the_stored_checkpoint_needs(tmp_path, number):
    """From its n-th put on, the storage takes nothing; then the pod starts again."""
    found = set()
    for puts in itertools.count():
        platform = Watched(tmp_path / str(puts))
        for earlier in range(1, number):
            with checkpoint_store(platform, "key", resume=True) as store:
                written(store, earlier)
        platform.left = puts
        with checkpoint_store(platform, "key", resume=True) as store:
            written(store, number)
        is_over, platform.left = platform.left >= 0, 10**9
        for _ in range(2):
            shutil.rmtree(tmp_path / str(puts) / "pod-0")
            with checkpoint_store(platform, "key", resume=True) as store:
                found.add(whole(store.path))
                written(store, whole(store.path) + 1)
        if is_over:
            break
    assert {number - 1, number} <= found
    assert puts >= 4


@pytest.mark.parametrize(
    "content", ["", "[" * 100_000, "[3]", '{"key-1.pt": "../secret", "../key-1.pt": "0", "key-2.pt": 0, "key-1": "0"}']
)
def test_a_list_that_is_damaged_or_of_another_names_nothing_elsewhere(tmp_path, content):
    with checkpoint_store(Folders(tmp_path, 0), "key", resume=True) as store:
        written(store, 1)
    folder = tmp_path / "0" / "checkpoints" / "checkpoint-best"
    (folder.parent / "secret").write_bytes(b"of another")
    (folder / "list.json").write_text(content)
    with checkpoint_store(Folders(tmp_path, 1), "key", resume=True) as store:
        assert store.path.read_bytes() == b"1"
        assert not [*models_beside(store.path).glob("**/*")]
        assert not [*store.path.parent.glob("*.pt")]
