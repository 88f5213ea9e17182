"""What a local run finds out anew each time, though a cluster remembers it."""

import os
from dataclasses import dataclass

import pytest
from flytekit import Cache, task
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.data.sources.datasets import prepared_dir
from flyte_ddp.flyte1.flytekit_compat import local_cache
from flyte_ddp.flyte1.prepare import forget_lost_results, resolve_dataset
from flyte_ddp.recipes.hyperparameters import Hyperparameters
from flyte_ddp.settings import RunOptions
from tests.pod import small_dataset


def test_a_stand_in_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_DATA_DIR", str(tmp_path))
    for name in ("http_proxy", "https_proxy"):  # refuses all connections
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    resolved = [resolve_dataset(hp=Hyperparameters(), options=RunOptions()) for _ in range(2)]
    small_dataset(prepared_dir("mnist"))
    assert [*resolved, resolve_dataset(hp=Hyperparameters(), options=RunOptions())] == ["digits", "digits", "mnist"]


@task(cache=Cache(version="1"))
def folder_at(path: str) -> FlyteDirectory:
    return FlyteDirectory(path, remote_directory=False)


@pytest.fixture
def entries(tmp_path):
    """Two of a task of this process, with the folders that they name, and one as another project would have it."""
    folders = []
    for name in ("a", "b"):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        folder_at(path=str(folders[-1]))
    cache = local_cache()
    keys = [key for key in cache if "folder_at" in key]
    cache["another.project.train-1-0"] = cache[keys[0]]
    yield cache, folders
    for key in (*keys, "another.project.train-1-0"):
        cache.pop(key, None)


def ours(cache):
    return [key for key in cache if "folder_at" in key]


def test_entries_whose_files_are_gone_are_dropped_and_those_of_other_projects_stay(entries):
    cache, folders = entries
    forget_lost_results()
    assert len(ours(cache)) == 2
    folders[0].rmdir()
    forget_lost_results()
    assert len(ours(cache)) == 1
    assert "another.project.train-1-0" in cache


@dataclass
class Nested:
    folders: list[FlyteDirectory]


@task(cache=Cache(version="1"))
def folders_at(
    parent: str,
) -> tuple[FlyteDirectory | None, dict[str, FlyteDirectory], list[list[FlyteDirectory]], Nested, Nested | None]:
    one, two, three, four, five = (FlyteDirectory(f"{parent}/{name}", remote_directory=False) for name in range(5))
    return one, {"a": two}, [[three]], Nested([four]), Nested([five])


@pytest.mark.parametrize("lost", range(5))
def test_a_folder_is_missed_however_deep_in_an_output_it_is(tmp_path, lost):
    for name in range(5):
        (tmp_path / str(name)).mkdir()
    folders_at(parent=str(tmp_path))
    cache = local_cache()
    (key,) = [key for key in cache if "folders_at" in key]
    forget_lost_results()
    assert key in cache
    (tmp_path / str(lost)).rmdir()
    forget_lost_results()
    assert key not in cache


def test_another_run_may_drop_entries_at_the_same_time(entries, monkeypatch):
    cache, _ = entries

    def gone(path):
        for key in ours(cache):
            del cache[key]
        return False

    monkeypatch.setattr(os.path, "exists", gone)
    forget_lost_results()
    assert not ours(cache)
