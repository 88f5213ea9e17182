"""Datasets from their originals to the prepared form, in folders shared, empty, damaged or read-only."""

import lzma
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flyte_ddp.data.prepared.prepared import open_split, read_description, verify
from flyte_ddp.data.sources.datasets import SOURCES, data_dir, prepare, prepared_dir
from flyte_ddp.errors import DownloadError, InputError
from flyte_ddp.recipes.hyperparameters import DATASETS
from flyte_ddp.whole_files import temporary_beside
from tests.pod import TWO_NODES, Pod, literal, package

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    monkeypatch.setenv("DDP_DATA_DIR", str(folder))
    monkeypatch.delenv("DDP_DATA_MIRROR", raising=False)
    return folder


@pytest.fixture(scope="module")
def mirror(test_data, tmp_path_factory):
    """The original files of CIFAR-10, unpacked."""
    unpacked = tmp_path_factory.mktemp("mirror") / "cifar-10-batches-py"
    unpacked.mkdir()
    for packed in (test_data / "CIFAR10" / "cifar-10-batches-py").glob("*.xz"):
        (unpacked / packed.stem).write_bytes(lzma.decompress(packed.read_bytes()))
    return unpacked.parent


def test_every_dataset_of_the_hyperparameters_has_a_source():
    assert set(SOURCES) == set(DATASETS) - {"auto"}


def test_unknown_name_lists_the_known():
    with pytest.raises(InputError, match="dataset must be one of mnist, fashion_mnist, cifar10, digits, got 'minst'"):
        prepare("minst")


def test_data_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DDP_DATA_DIR", "~/here")
    assert data_dir() == tmp_path / "here"
    monkeypatch.delenv("DDP_DATA_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_dir() == tmp_path / ".cache" / "flyte-ddp"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_dir() == Path("/cache/flyte-ddp")
    monkeypatch.setenv("DDP_DATA_DIR", "~nobody-of-this-name/data")
    with pytest.raises(InputError, match="no home folder for ~nobody-of-this-name/data: set DDP_DATA_DIR to an abs"):
        data_dir()


def test_digits_are_the_same_everywhere_and_prepared_once(folder):
    assert not prepared_dir("digits").exists()
    directory = prepare("digits")
    assert prepared_dir("digits").is_dir()
    description = verify(directory)
    assert (description.train_samples, description.test_samples) == (1501, 296)
    assert description.image_shape == (1, 28, 28)
    # Whoever changes the construction raises the format's version too, or prepared folders stay as they are.
    assert description.digest == "6766a31642573ca20a193dc197f424eda102015b0e89bef6eb455ec73d3845ce"
    for split in ("train", "test"):
        images, labels = open_split(directory, split)
        assert images.max() == 255
        assert np.bincount(labels, minlength=10).min() > 0.09 * len(labels)
    before = directory.stat().st_ino
    assert prepare("digits") == directory
    assert directory.stat().st_ino == before
    assert os.listdir(folder) == ["prepared"]


def test_what_a_killed_download_has_left_is_removed_by_later_runs(folder):
    """Also once the dataset is there, as the run after a kill is too early for that."""
    prepare("digits")
    places = "MNIST/raw/train.gz", "CIFAR10/cifar-10-batches-py/data_batch_1", "CIFAR10/cifar.tar.gz", "prepared/mnist"
    left = [temporary_beside(folder / place) for place in places]
    for number, path in enumerate(left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, 0) if number else None)
    prepare("digits")
    assert [path.exists() for path in left] == [True, False, False, False]  # the first may be another run's


@pytest.mark.parametrize("content", [b"{", b""])
def test_damaged_folder_is_prepared_again(content, capsys):
    directory = prepare("digits")
    (directory / "dataset.json").write_bytes(content)
    assert prepare("digits") == directory
    verify(directory)
    assert "Warning: digits is prepared again: " in capsys.readouterr().err


def test_read_only_folder_is_one_clear_error(folder):
    folder.mkdir()
    if os.geteuid() == 0:  # permission bits mean nothing to root
        if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", folder]).returncode:
            pytest.skip("needs the right to mount a read-only tmpfs, or a user other than root")
    else:
        folder.chmod(0o555)
    try:
        with pytest.raises(InputError, match=r"cannot write to .*data: .*DDP_DATA_DIR"):
            prepare("digits")
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", folder], check=True)


def test_full_disk_is_one_clear_error(folder):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with pytest.raises(InputError, match=r"cannot write to .*: No space left on device.*DDP_DATA_DIR"):
            prepare("digits")
        assert os.listdir(folder / "prepared") == []
    finally:
        subprocess.run(["umount", folder], check=True)


def test_mirror_is_checked_before_anything_slow(monkeypatch):
    monkeypatch.setenv("DDP_DATA_MIRROR", "ftp://host/")
    with pytest.raises(InputError, match="DDP_DATA_MIRROR"):
        prepare("mnist")


def test_real_mnist_and_fashion_mnist_from_one_mirror(test_data, folder, monkeypatch):
    monkeypatch.setenv("DDP_DATA_MIRROR", test_data.as_uri())
    mnist = read_description(prepare("mnist"))
    assert (mnist.mean, mnist.std) == ((0.1307,), (0.3081,))
    assert (mnist.train_samples, mnist.test_samples, mnist.image_shape) == (60_000, 10_000, (1, 28, 28))
    fashion = read_description(prepare("fashion_mnist"))
    assert (fashion.mean, fashion.std) == ((0.286,), (0.353,))
    assert fashion.classes[0] == "T-shirt/top"
    assert sorted(os.listdir(folder)) == ["FashionMNIST", "MNIST", "prepared"]
    assert all(name.endswith(".gz") for name in os.listdir(folder / "MNIST" / "raw"))

    # Without the prepared form, the verified originals serve without any mirror; a damaged one is fetched again.
    shutil.rmtree(prepared_dir("mnist"))
    monkeypatch.setenv("DDP_DATA_MIRROR", (test_data / "MNIST" / "raw").as_uri())
    os.truncate(folder / "MNIST" / "raw" / "t10k-labels-idx1-ubyte.gz", 100)
    assert read_description(prepare("mnist")) == mnist


@pytest.mark.slow
def test_a_pod_prepares_real_cifar10_from_unpacked_files_within_its_memory(mirror, folder, tmp_path):
    task = package(**TWO_NODES).tasks["flyte_ddp.flyte1.prepare.prepare_dataset"]
    environment = {"DDP_DATA_MIRROR": mirror.as_uri(), "DDP_DATA_DIR": str(folder)}
    Pod(task, {"name": literal("cifar10")}, tmp_path / "pod", environment=environment).run()
    cifar10 = read_description(prepared_dir("cifar10"))
    assert (cifar10.mean, cifar10.std) == ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
    assert (cifar10.train_samples, cifar10.test_samples, cifar10.image_shape) == (50_000, 10_000, (3, 32, 32))
    assert cifar10.classes[:2] == ("airplane", "automobile")
    assert sorted(os.listdir(folder)) == ["CIFAR10", "prepared"]


def test_cifar10_that_is_not_to_be_had_is_one_clear_error(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy"):  # refuses, so that no test asks the world
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "mirror").mkdir()
    monkeypatch.setenv("DDP_DATA_MIRROR", (tmp_path / "mirror").as_uri())
    with pytest.raises(DownloadError, match=r"no mirror delivered cifar-10-python.tar.gz(.|\n)*DDP_DATA_MIRROR"):
        prepare("cifar10")
