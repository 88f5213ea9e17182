"""Tar files of images: whatever would lose samples is refused."""

import io
import json
import tarfile

import pytest
from PIL import Image

from flyte_ddp.data.blocks.tar import TarImages, index_tars
from flyte_ddp.errors import DataError
from tests.data.test_blocks import change, read


def write_tar(path, samples, size=(8, 6)):
    with tarfile.open(path, "w") as file:
        for key, label in samples:
            buffer = io.BytesIO()
            Image.new("RGB", size, (label, 0, 0)).save(buffer, "PNG")
            for extension, content in (("png", buffer.getvalue()), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"some/{key}.{extension}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))


def test_tar_files(tmp_path):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    write_tar(tmp_path / "b.tar", [("002", 30)])
    with pytest.raises(DataError, match=r"index.json is not there"):
        TarImages(tmp_path, (3, 4, 4))
    index_tars(tmp_path)
    blocks = TarImages(tmp_path, (3, 4, 4))
    assert blocks.lengths.tolist() == [2, 1]
    images, labels = read(blocks, 0, tmp_path)
    assert images.shape == (2, 3, 4, 4)
    assert images[:, 0, 0, 0].tolist() == labels.tolist() == [10, 20]


def test_a_tar_file_that_is_wrong_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    index_tars(tmp_path)
    blocks = TarImages(tmp_path, (3, 4, 4), labels="json")
    with pytest.raises(DataError, match=r"a.tar: some/000 must have .json and one of jpg, .*, got \['png', 'cls'\]"):
        read(blocks, 0, tmp_path)
    change(tmp_path / "a.tar")
    with pytest.raises(DataError, match=r"a.tar has changed since it was written"):
        read(TarImages(tmp_path, (3, 8, 8)), 0, tmp_path / "..")
    (tmp_path / "c.tar").write_bytes(b"no tar" * 1000)
    for name in ("a.tar", "index.json"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"c.tar is no tar file, or cut short"):
        index_tars(tmp_path)


def appended(kind, *names):
    """Adds members of 4 bytes, or links, to a tar file."""

    def damage(path):
        with tarfile.open(path, "a") as file:
            for name in names:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = kind, "some/000.png"
                member.size = 4 if kind == tarfile.REGTYPE else 0
                file.addfile(member, io.BytesIO(b"1234"))

    return damage


def damage_second_header(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"some/001.png")] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (appended(tarfile.LNKTYPE, "some/002.png", "some/002.cls"), r"some/002.png is a link: .* --hard-dereference"),
        (appended(tarfile.SYMTYPE, "some/002.png", "some/002.cls"), r"some/002.png is a link: .* --dereference"),
        (
            appended(tarfile.REGTYPE, "some/001.png", "some/001.cls"),
            r"some/001 has .png more than once: .*another name",
        ),
        (damage_second_header, r"more follows .* damaged, or several in one: write it again"),
        (lambda path: path.write_bytes(2 * path.read_bytes()), r"more follows .* damaged, or several in one"),
        (lambda path: path.write_bytes(path.read_bytes().partition(b"some/001.png")[0] + b"some/0"), r"or cut short"),
        (lambda path: path.write_bytes(path.read_bytes().partition(b"some/001.png")[0]), r"its end is missing"),
    ],
)
def test_a_tar_file_that_would_lose_samples_is_refused(tmp_path, damage, words):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    damage(tmp_path / "a.tar")
    with pytest.raises(DataError, match=rf"a.tar.*{words}"):
        index_tars(tmp_path)


def test_an_index_that_does_not_fit_its_tar_file_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", [("000", 10), ("001", 20)])
    index_tars(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    index["blocks"][0]["rows"] = 3
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"a.tar has 2 samples, where 3 were announced: call index_tars again"):
        read(TarImages(tmp_path, (3, 4, 4)), 0, tmp_path)
