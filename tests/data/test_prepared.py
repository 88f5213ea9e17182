"""The prepared form on a real disk: whole or not at all, and every damage named."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from flyte_ddp.data.prepared.prepared import (
    FILES,
    open_split,
    read_description,
    verify,
)
from flyte_ddp.data.prepared.writer import discard, write_prepared
from flyte_ddp.errors import DataError, InputError
from flyte_ddp.recipes.images import Normaliser
from flyte_ddp.whole_files import remove_leftovers, temporary_beside

ROOT = Path(__file__).resolve().parents[2]


def arrays(seed=0, channels=3, train=40, test=10):
    random = np.random.default_rng(seed)
    shapes = [(train, channels, 5, 6), (train,), (test, channels, 5, 6), (test,)]
    return [random.integers(0, 256 if len(shape) == 4 else 2, shape, np.uint8) for shape in shapes]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "prepared" / "cats"
    write_prepared(folder, "cats", ("cat", "dog"), *arrays())
    return folder


def run(code, *arguments):
    """Starts a fresh interpreter that knows the package."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_what_was_written_is_read(folder):
    description = verify(folder)
    assert description == read_description(folder)
    assert (description.name, description.classes) == ("cats", ("cat", "dog"))
    assert (description.train_samples, description.test_samples, description.image_shape) == (40, 10, (3, 5, 6))
    images, labels, *_ = arrays()
    np.testing.assert_allclose(description.mean, (images / 255).mean((0, 2, 3)), atol=5.1e-5)
    np.testing.assert_allclose(description.std, (images / 255).std((0, 2, 3)), atol=5.1e-5)
    for split, expected in (("train", (images, labels)), ("test", arrays()[2:])):
        for found, array in zip(open_split(folder, split), expected, strict=True):
            np.testing.assert_array_equal(found, array)
    assert sorted(os.listdir(folder)) == sorted([*FILES, "dataset.json"])
    assert os.listdir(folder.parent) == ["cats"]


@pytest.mark.parametrize("spare", [0, 1, 40])
def test_a_channel_of_one_value_or_nearly_so_can_be_normalised(tmp_path, spare):
    """spare: how many pixels of a channel differ, by 1."""
    train, *others = arrays(train=400)
    train[:, 1] = 77
    train[:spare, 1, 0, 0] = 78
    description = write_prepared(tmp_path / "flat", "flat", ("cat", "dog"), train, *others)
    images = Normaliser(description.mean, description.std, torch.device("cpu"))(torch.from_numpy(train))
    assert images.isfinite().all()
    mean, std = images[:, 1].double().mean(), images[:, 1].double().std(correction=0)
    assert abs(mean) < 0.02
    assert std == (pytest.approx(1, rel=0.002) if spare else 0)


def test_digest_follows_the_content_alone(folder, tmp_path):
    same = write_prepared(tmp_path / "elsewhere", "cats", ["cat", "dog"], *arrays())
    assert same.digest == read_description(folder).digest
    other = write_prepared(tmp_path / "other", "cats", ["cat", "dog"], *arrays(seed=1))
    renamed = write_prepared(tmp_path / "renamed", "cats", ["dog", "cat"], *arrays())
    assert len({same.digest, other.digest, renamed.digest}) == 3


def test_maps_serve_torch_without_warning_and_never_change_the_files(folder):
    images, labels = open_split(folder, "train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(images)[:] = 0
    assert torch.from_numpy(labels).dtype == torch.int64
    verify(folder)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {
    "missing": (Path.unlink, "missing"),
    "cut short": (cut, "cut short"),
    "cut in its header": (lambda path: os.truncate(path, 20), "cut short"),
    "empty": (lambda path: os.truncate(path, 0), "cut short"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes long, expected"),
    "pickled": (lambda path: path.write_bytes(np.array([{}], object).dumps()), "not a .npy file"),
    "of another shape": (lambda path: np.save(path, np.zeros((2, 2))), r"float64 \(2, 2\), expected"),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("filename", FILES)
def test_damaged_array_is_named_at_a_glance(filename, kind, folder):
    damage, what = DAMAGES[kind]
    damage(folder / filename)
    with pytest.raises(DataError, match=f"{filename} is .*{what}.*: delete the folder .*cats and run again$"):
        read_description(folder)


@pytest.mark.parametrize("filename", FILES)
def test_flipped_bits_are_found_by_verify(filename, folder):
    flip(folder / filename)
    with pytest.raises(DataError, match=f"{filename} is changed since it was written"):
        verify(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda text: text[:-10], "broken JSON"),
        (lambda text: "[" * 100_000, "broken JSON"),
        (lambda text: "\udcff", "broken JSON"),
        (lambda text: "[]", "of format null"),
        (lambda text: text.replace('"format": 2', '"format": 0'), "of format 0 where this version reads format 2"),
        (lambda text: text.replace('"dog"', '"dig"'), "changed since it was written"),
        (lambda text: json.dumps({"format": 2}), "changed since it was written"),
    ],
)
def test_damaged_description_is_named(change, what, folder):
    path = folder / "dataset.json"
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=f"dataset.json is {what}"):
        read_description(folder)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere/dataset\.json is missing"):
        verify(tmp_path / "nowhere")


def test_damaged_folder_is_replaced_and_an_intact_one_stays(folder):
    before = folder.stat().st_ino
    write_prepared(folder, "cats", ("cat", "dog"), *arrays())
    assert folder.stat().st_ino == before
    flip(folder / FILES[0])
    write_prepared(folder, "cats", ("cat", "dog"), *arrays())
    verify(folder)
    assert os.listdir(folder.parent) == ["cats"]


def test_what_was_damaged_is_removed_unless_another_process_has_mended_it(folder):
    before = folder.stat().st_ino
    discard(folder)
    assert folder.stat().st_ino == before
    flip(folder / FILES[0])
    for _ in range(2):  # or has removed it
        discard(folder)
    assert os.listdir(folder.parent) == []


@pytest.mark.parametrize(
    ("position", "wrong", "what"),
    [
        (0, np.zeros((40, 3, 5, 6)), "train images must be uint8"),
        (2, np.zeros((10, 5, 6), np.uint8), r"test images must be uint8 of shape \(N, C, H, W\)"),
        (2, np.zeros((10, 1, 5, 6), np.uint8), r"C, H and W as in training, got uint8 \(10, 1, 5, 6\)"),
        (0, np.zeros((0, 3, 5, 6), np.uint8), "train images must be"),
        (1, np.zeros(39, np.int64), r"train labels must be integers of shape \(40,\)"),
        (3, np.zeros(10), "test labels must be integers"),
        (3, np.full(10, 2), r"test labels must be integers of shape \(10,\) from 0 to 1, got .* of the values \[2\]"),
        (3, np.full(10, -1), r"of the values \[-1\]"),
    ],
)
def test_wrong_arrays_are_refused_before_anything_is_written(position, wrong, what, tmp_path):
    given = arrays()
    given[position] = wrong
    with pytest.raises(InputError, match=what):
        write_prepared(tmp_path / "cats", "cats", ("cat", "dog"), *given)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_four_writers_at_once_leave_one_intact_folder(damaged, folder):
    if damaged:
        flip(folder / FILES[0])
    else:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    code = """
        import sys
        import numpy as np
        from flyte_ddp.data.prepared.prepared import verify
        from flyte_ddp.data.prepared.writer import write_prepared
        images, labels = np.zeros((500, 3, 32, 32), np.uint8), np.zeros(500, int)
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(5):
            write_prepared(sys.argv[1], "zeros", ("0",), images, labels, images, labels)
            verify(sys.argv[1])
    """
    writers = [run(code, folder) for _ in range(4)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        print("go", file=writer.stdin, flush=True)
    for writer in writers:
        _, errors = writer.communicate()
        assert writer.returncode == 0, errors
    assert verify(folder).name == "zeros"
    assert os.listdir(folder.parent) == ["cats"]


def test_full_disk_is_one_clear_error_and_nothing_stays(folder):
    code = """
        import resource, sys
        import numpy as np
        from flyte_ddp.errors import InputError
        from flyte_ddp.data.prepared.writer import write_prepared
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        images, labels = np.zeros((500, 1, 8, 8), np.uint8), np.zeros(500, int)
        try:
            write_prepared(sys.argv[1], "zeros", ("0",), images, labels, images, labels)
        except InputError as error:
            print(error)
    """
    output, errors = run(code, folder).communicate()
    assert f"cannot write to {folder.parent}: File too large" in output, errors
    assert "DDP_DATA_DIR" in output
    assert os.listdir(folder.parent) == ["cats"]
    assert verify(folder).name == "cats"


def test_only_old_leftovers_are_removed(tmp_path):
    old, new = temporary_beside(tmp_path / "old"), temporary_beside(tmp_path / "new")
    for path in (old, new):
        path.mkdir()
        (path / "file").touch()
    os.utime(old, (0, 0))
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [new.name]


def test_workers_get_numpy_alone():
    code = """
        import sys, flyte_ddp.data.prepared.prepared
        print([name for name in ("torch", "torchvision", "requests", "flytekit") if name in sys.modules])
    """
    output, errors = run(code).communicate()
    assert output == "[]\n", errors
