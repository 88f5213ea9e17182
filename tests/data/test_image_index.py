"""A folder of image files: what is found in it, what is refused, and what is kept of it."""

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.data.description import FolderDescription
from flyte_ddp.data.image_files import decode, link_images
from flyte_ddp.data.prepared.prepared import open_images, open_split, verify
from flyte_ddp.data.sources import image_index
from flyte_ddp.data.sources.datasets import prepare
from flyte_ddp.data.sources.image_index import index_folder, stamp_images, verify_images, write_folder
from flyte_ddp.data.sources.image_settings import ImageSettings
from flyte_ddp.errors import DataError, InputError
from tests.commands import unreadable

SIZE = ImageSettings(image_size=28, channels="grayscale", unreadable_share=0.1)


@pytest.fixture
def folder(tmp_path):
    """Fifty real digits in files: five or so per class."""
    images, labels = open_split(prepare("digits"), "train")
    write_folder(tmp_path / "digits", [f"class {digit}" for digit in range(10)], images[:50], labels[:50])
    return tmp_path / "digits"


def index(folder, images=SIZE, said=None):
    return index_folder(folder, folder.name, images, (said if said is not None else []).append)


def described(directory) -> FolderDescription:
    description = verify(directory)
    assert isinstance(description, FolderDescription)
    return description


def opened(folder, at, split):
    link_images(at, folder)
    return open_images(at, split)


def test_every_image_is_found_again_by_its_index(folder):
    directory = index(folder)
    description = described(directory)
    assert description.name == "digits"
    assert description.image_shape == (1, 28, 28)
    assert description.classes == tuple(f"class {digit}" for digit in range(10))
    assert (description.train_samples + description.test_samples, description.unreadable) == (50, 0)
    originals, labels = open_split(prepare("digits"), "train")
    expected = sorted((int(label), image.tobytes()) for label, image in zip(labels[:50], originals[:50], strict=True))
    found = []
    for split in ("train", "test"):
        images, own_labels = opened(folder, directory, split)
        assert set(own_labels[:10]) == set(range(10)), "the classes come by turns"
        found += [(int(label), images[index].tobytes()) for index, label in enumerate(own_labels)]
    assert sorted(found) == expected


def test_images_that_were_replaced_since_are_noticed(folder, tmp_path):
    directory = index(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    verify_images(directory, copy)
    first, second, *_ = sorted(copy.rglob("*.png"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(DataError, match="copy has other images than when it was indexed: run again"):
        verify_images(directory, copy)
    second.unlink()
    with pytest.raises(DataError, match=rf"{second} cannot be read \(No such file"):
        verify_images(directory, copy)


def test_the_digest_follows_the_content_not_the_place(folder, tmp_path):
    digest = verify(index(folder)).digest
    (tmp_path / "elsewhere").mkdir()
    folder = folder.rename(tmp_path / "elsewhere" / "digits")
    assert verify(index(folder)).digest == digest
    before, first = stamp_images(folder), next(folder.rglob("*.png"))
    Image.new("L", (28, 28), 7).save(first)
    assert stamp_images(folder) != before
    assert verify(index(folder)).digest != digest


def test_a_file_of_the_same_size_and_time_is_another_one(folder):
    """As when a newer version is unpacked over the older one, from archives without times."""
    file = next(folder.rglob("*.png")).with_suffix(".bmp")
    Image.new("L", (28, 28), 7).save(file)
    os.utime(file, (0, 0))
    before, size = stamp_images(folder), file.stat().st_size
    Image.new("L", (28, 28), 8).save(file)
    os.utime(file, (0, 0))
    assert (file.stat().st_size, stamp_images(folder) == before) == (size, False)


def test_train_and_test_folders_are_the_splits_where_both_are_there(folder, tmp_path):
    both = tmp_path / "both"
    both.mkdir()
    folder.rename(both / "train")
    for name in ("class 3", "class 4"):
        (both / "test" / name).mkdir(parents=True)
        Image.new("RGB", (60, 40), "white").save(both / "test" / name / "photo.JPEG", "jpeg")
    description = described(index(both))
    assert (description.train_samples, description.test_samples) == (50, 2)
    images, labels = opened(both, index(both), "test")
    assert labels.tolist() == [3, 4]
    assert (images[0] > 250).all()
    (both / "test" / "class 3").rename(both / "test" / "a stranger")
    with pytest.raises(InputError, match="classes that train/ has not: a stranger"):
        index(both)


@pytest.mark.parametrize("names", [("train", "val"), ("Train", "Test"), ("train", "test", "Validation"), ("dev",)])
def test_other_splits_are_refused_rather_than_left_out_or_taken_for_classes(folder, tmp_path, names):
    data = tmp_path / "data"
    for name in names:
        shutil.copytree(folder, data / name)
    with pytest.raises(InputError, match=rf"got {', '.join(sorted(names))}: name the splits train and test, and move"):
        index(data)


def test_a_class_may_be_called_train(folder):
    (folder / "class 1").rename(folder / "train")
    assert "train" in described(index(folder)).classes


def test_an_image_is_resized_and_cut_around_its_centre(tmp_path):
    stripes = np.zeros((40, 120, 3), np.uint8)
    stripes[:, 40:80] = (10, 200, 30)  # the middle third
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    image = decode(str(tmp_path / "stripes.png"), (3, 20, 20))
    assert image.shape == (3, 20, 20)
    assert (image[:, :, 2:-2] == np.array([10, 200, 30])[:, None, None]).all()
    assert decode(str(tmp_path / "stripes.png"), (1, 20, 20)).shape == (1, 20, 20)


def test_a_small_file_of_too_many_pixels_is_not_decoded(tmp_path):
    for name in ("huge.png", "huge.jpeg"):
        Image.new("1" if name.endswith("png") else "L", (10_000, 6_000)).save(tmp_path / name)
    with pytest.raises(ValueError, match="10000 x 6000 pixels, more than 50,000,000: scale it down"):
        decode(tmp_path / "huge.png", (1, 20, 20))
    assert decode(tmp_path / "huge.jpeg", (1, 20, 20)).shape == (1, 20, 20), "decoded at an eighth of its size"


def test_images_that_links_lead_to_are_found(folder, tmp_path):
    before = described(index(folder)).train_samples
    shutil.copytree(folder / "class 1", tmp_path / "more of class 1")
    (folder / "class 1" / "more").symlink_to(tmp_path / "more of class 1")
    assert described(index(folder)).train_samples > before


def test_hidden_files_and_those_of_hidden_folders_are_left_out(folder):
    before = stamp_images(folder)
    image = next((folder / "class 1").iterdir())
    (folder / "class 2" / "more" / ".ipynb_checkpoints").mkdir(parents=True)
    for name in (".1.png", "more/.ipynb_checkpoints/1.png"):
        shutil.copy(image, folder / "class 2" / name)
    assert stamp_images(folder) == before


def test_unreadable_files_are_named_and_counted_up_to_the_share(folder):
    good = sorted((folder / "class 1").iterdir())
    (folder / "class 1" / "empty.png").touch()
    (folder / "class 2" / "text.jpg").write_text("not an image at all")
    Image.new("RGB", (28, 28)).save(folder / "class 2" / "script.png", "eps")
    (folder / "class 3" / "cut.png").write_bytes(good[0].read_bytes()[:-60])
    (folder / "class 3" / "notes.txt").write_text("of no concern")
    os.symlink(folder / "nowhere", folder / "class 4" / "link.png")
    said: list = []
    description = described(index(folder, said=said))
    assert (description.train_samples + description.test_samples, description.unreadable) == (50, 5)
    (line,) = said
    assert "5 of 55 image files" in line
    assert "(9.09%)" in line
    shown = description.remarks["Files that cannot be read"]
    for name in (
        "class 1/empty.png (not an image)",
        "class 2/text.jpg",
        "class 2/script.png (not an image)",
        "class 3/cut.png",
        "class 4/link.png (No such",
    ):
        assert name in line
        assert name in shown
    with pytest.raises(InputError, match=r"5 of 55 .* \(9.09%\), more than .*unreadable_share \(5.00%\).*empty\.png"):
        index(folder, ImageSettings(unreadable_share=0.05))


def test_as_many_as_are_allowed_are_left_out_whatever_rounding_says(folder):
    said: list[str] = []
    image_index._judge(folder, ["cut.png"] * 29, 100, 0.29, said.append)  # 0.29 * 100 < 29
    assert said


def test_a_file_that_is_broken_later_is_named(folder):
    directory = index(folder)
    images, _ = opened(folder, directory, "train")
    path = folder / os.fsdecode(images.names[7])
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"\.png can no longer be read \(not an image\): put it back"):
        images[7]


def test_small_classes_are_left_out_and_odd_names_are_not(folder):
    for file in sorted((folder / "class 0").iterdir())[1:]:
        file.unlink()
    os.rename(folder / "class 9", os.path.join(os.fsencode(folder), b"caf\xe9"))
    description = described(index(folder))
    assert description.left_out == 1
    assert description.classes == ("caf\N{REPLACEMENT CHARACTER}", *(f"class {digit}" for digit in range(1, 9)))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: folder.rename(folder.with_name("gone")), "does not exist: give a folder"),
        (lambda folder: folder.rename(folder.with_name("gone")) and folder.touch(), "is a file: give a folder"),
        (lambda folder: [p.unlink() for p in folder.rglob("*.png")], "has no image files .*sub-folder"),
        (lambda folder: [p.rename(folder / p.name) for p in folder.rglob("*.png")], "has no image files .*sub-folder"),
        (lambda folder: [p.unlink() for p in folder.rglob("*.png") if p.parent.name > "class 0"], "one class only"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(folder, spoil, words):
    spoil(folder)
    with pytest.raises(InputError, match=words):
        stamp_images(folder)


def test_limits_that_leave_nothing_are_refused(folder):
    with pytest.raises(InputError, match=r"least_images is 500, and 0 classes .* lower it"):
        index(folder, ImageSettings(least_images=500))
    with pytest.raises(InputError, match=r"unreadable_share must be at least 0 and below 1, got 1\.5"):
        ImageSettings(unreadable_share=1.5)


@pytest.mark.parametrize("closed", ["", "cats"])
def test_a_folder_that_may_not_be_read_is_named_and_no_class_left_out_in_silence(closed):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # others may list what is below /tmp
        for name in ("cats", "dogs"):
            Path(folder, name).mkdir()
            Path(folder, name, "0.png").touch()
        os.chmod(folder, 0o755)
        message = f"{Path(folder, closed)}.* may not be read: allow it"
        with unreadable(Path(folder, closed)), pytest.raises(InputError, match=message):
            stamp_images(Path(folder))
