"""Image files of every depth and kind: what is decoded how, and what is refused."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from flyte_ddp.data.image_files import decode, reason

SEEN = [0, 65, 130, 194, 255]
DEEP = np.array(SEEN, np.uint16) * 257
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # TIFF's kinds of numbers
WHITE_IS_ZERO, BLACK_IS_ZERO, COLOURS = 0, 1, 2  # and of channels


def tiff(rows: np.ndarray, kind: int = UNSIGNED, meaning: int = BLACK_IS_ZERO, bits: int = 0) -> bytes:
    """A file with values (height, width, channels), which Pillow reads but cannot write; bits: else those of the
    type."""
    height, width, channels = rows.shape
    order = ">" if rows.dtype.byteorder == ">" else "<"
    content, bits = rows.tobytes(), bits or 8 * rows.itemsize
    after = 8 + 2 + 10 * 12 + 4
    tags = [
        (256, 3, 1, width), (257, 3, 1, height), (258, 3, channels, bits), (259, 3, 1, 1), (262, 3, 1, meaning),
        (273, 4, 1, after + 2 * 2 * channels), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, len(content)),
        (339, 3, channels, kind),
    ]  # fmt: skip
    entries = extra = b""
    for tag, size, count, value in tags:
        packed = struct.pack(f"{order}HH" if size == 3 else f"{order}I", *((value, 0) if size == 3 else (value,)))
        if count > 1:
            packed = struct.pack(f"{order}I", after + len(extra))
            extra += struct.pack(f"{order}H", value) * count
        entries += struct.pack(f"{order}HHI", tag, size, count) + packed
    head = b"II" if order == "<" else b"MM"
    head += struct.pack(f"{order}HIH", 42, 8, len(tags)) + entries + struct.pack(f"{order}I", 0)
    return head + extra.ljust(2 * 2 * channels, b"\0") + content


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def seen(content: bytes, channels: int = 1, width: int = len(SEEN), height: int = 1) -> np.ndarray:
    return decode(io.BytesIO(content), (channels, height, width))


def packed_12_bits(values: np.ndarray) -> bytes:
    bits = "".join(f"{value:012b}" for value in values)
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


GREY = DEEP[None, :, None]
IN_12_BITS = np.frombuffer(packed_12_bits(DEEP >> 4), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        saved(Image.fromarray(DEEP[None]), "PNG"),
        saved(Image.fromarray(DEEP[None]), "TIFF"),
        tiff(GREY),
        tiff(GREY.astype(">u2")),
        tiff(65535 - GREY, meaning=WHITE_IS_ZERO),
        tiff(np.repeat(GREY, 3, axis=2), meaning=COLOURS),
        tiff(np.repeat(GREY, 3, axis=2).astype(">u2"), meaning=COLOURS),
        b"P5 5 1 65535\n" + DEEP.astype(">u2").tobytes(),
        b"P5 5 1 4095\n" + (DEEP >> 4).astype(">u2").tobytes(),
        b"P6 5 1 65535\n" + np.repeat(DEEP, 3).astype(">u2").tobytes(),
    ],
    ids=["png", "tiff", "II", "MM", "white is zero", "RGB", "RGB MM", "pgm", "pgm of 12 bits", "ppm"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bits_are_scaled_to_8(content, channels):
    image = seen(content, channels)
    assert np.abs(image - np.array(SEEN)).max() <= 1, "ITU-R weights round"
    assert (image[:, 0, ::4] == [0, 255]).all()


def test_a_tiff_of_12_bits_is_scaled_by_these():
    content = bytearray(tiff(GREY, bits=12))
    content[-2 * len(DEEP) :] = IN_12_BITS.tobytes()
    assert seen(bytes(content)).ravel().tolist() == SEEN


def test_colours_of_16_bits_in_a_png():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 1, 16, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(b"\0" + np.repeat(DEEP, 3).astype(">u2").tobytes()))
    image = seen(b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IEND", b""), 3)
    assert (image == np.array(SEEN)).all()


@pytest.mark.parametrize(
    "content",
    [
        tiff((GREY / 65535).astype(np.float32), FLOAT),
        tiff((GREY // 2).astype(np.int16), SIGNED),
        tiff(GREY.astype(np.uint32)),
        tiff(GREY.astype(np.int32), SIGNED),
        b"Pf 5 1 -1.0\n" + (DEEP / 65535).astype(np.float32).tobytes(),
    ],
    ids=["float", "signed", "unsigned of 32", "signed of 32", "pfm"],
)
def test_numbers_whose_range_no_file_tells_are_refused_with_a_remedy(content):
    with pytest.raises(ValueError, match=r"32 bits, or with a sign \(mode [IF]\): write it in 8 or 16 bits") as refused:
        seen(content)
    assert reason(refused.value).endswith("8 or 16 bits"), "in an index the remedy is not cut off"


def test_transparency_is_left_out_and_no_warning_told():
    palette = Image.new("P", (5, 1))
    palette.putpalette([255, 0, 0, 0, 255, 0])
    hidden = Image.new("RGBA", (5, 1), (255, 0, 0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for content in (
            saved(palette, "PNG", transparency=b"\x00\x80"),
            saved(palette, "GIF", transparency=0),
            saved(hidden, "PNG"),
            saved(hidden, "WEBP", lossless=True, exact=True),
        ):
            assert (seen(content, 3) == np.array([255, 0, 0])[:, None, None]).all()
            assert abs(int(seen(content, 1)[0, 0, 0]) - 76) <= 1


@pytest.mark.parametrize(("kind", "options"), [("TIFF", {}), ("JPEG", {"quality": 95})])
def test_printing_colours_become_those_of_a_screen(kind, options):
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(seen(saved(ink, kind, **options), 3, 8, 8)[:, 4, 4].astype(int) - [255, 0, 0]).max() <= 4


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "BMP", "GIF"])
def test_one_bit_is_black_and_white(kind):
    dots = [0, 255, 0, 255, 255]
    content = saved(Image.fromarray(np.array([dots], np.uint8)).convert("1"), kind)
    assert seen(content).ravel().tolist() == dots


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_images_in_a_file_the_first_counts(kind):
    first, *others = (Image.new("RGB", (5, 5), colour) for colour in ("red", "lime", "blue"))
    lossless = {"lossless": True} if kind == "WEBP" else {}
    content = saved(first, kind, save_all=True, append_images=others, **lossless)
    assert seen(content, 3, 5, 5)[:, 2, 2].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("shape", [(3, 40, 120), (1, 64, 64)])
def test_a_large_photo_is_as_sharp_whichever_way_the_camera_was_held(orientation, shape):
    """A JPEG is decoded at a part of its size, which has to suffice after it has been turned."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
    photo = small.resize((960, 720), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = seen(saved(photo, "JPEG", quality=95, exif=exif), shape[0], shape[2], shape[1])
    exact = seen(saved(photo, "PNG", exif=exif), shape[0], shape[2], shape[1])
    assert np.abs(turned.astype(int) - exact).mean() < 2


def test_deep_images_are_turned_too():
    exif = Image.Exif()
    exif[0x0112] = 3
    content = saved(Image.fromarray(DEEP[None]), "PNG", exif=exif)
    assert seen(content).ravel().tolist() == SEEN[::-1]
