"""Images in, videos and contact sheets out."""

import io
import struct
import zlib

import numpy as np
import pytest

from onepiece import InvalidInput
from stages import _video
from stages._video import Frames, contact_sheet, read_image, read_mp4, write_mp4
from stages._wan import SHIPPED_MODEL

pytestmark = pytest.mark.diffusion
Image = pytest.importorskip("PIL.Image", reason="needs the diffusion extra")

EXAMPLE = (SHIPPED_MODEL / "example.png").read_bytes()


def moving_square() -> Frames:
    """Nine frames of a patterned square that goes right."""
    pattern = np.random.default_rng(0).integers(0, 256, (3, 3, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    frames = np.zeros((9, 64, 64, 3), dtype=np.uint8)
    for index, frame in enumerate(frames):
        frame[20:44, 8 + 2 * index : 32 + 2 * index] = pattern
    return frames


def encoded(mode: str, file_format: str) -> bytes:
    """A small picture in some mode and format."""
    file = io.BytesIO()
    Image.new(mode, (20, 10), 1).save(file, format=file_format)
    return file.getvalue()


def huge_png(side: int) -> bytes:
    """A PNG of less than a hundred bytes whose header promises a large square."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("mode", "file_format"),
    [
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("L", "PNG"),
        ("P", "GIF"),
        ("1", "BMP"),
        ("CMYK", "JPEG"),
        ("L", "WEBP"),
    ],
)
def test_any_usual_image_becomes_rgb(mode: str, file_format: str) -> None:
    """Transparency, grey, palettes and print colours are all read."""
    image = read_image(encoded(mode, file_format))
    assert (image.mode, image.size) == ("RGB", (20, 10))


def test_images_are_turned_upright() -> None:
    """A camera's note that the picture lies on its side is heeded, as viewers do."""
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(file, format="JPEG", exif=exif)
    assert read_image(file.getvalue()).size == (10, 20)


@pytest.mark.parametrize(
    "data",
    [b"", b"no image at all", EXAMPLE[:200], b"\x89PNG\r\n\x1a\n", b"%PDF-1.7 ...", encoded("RGB", "TIFF")],
    ids=["empty", "text", "cut short", "only a signature", "another file", "a format that is not read"],
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    """The field is named, and what to send instead; no decoder's own error comes through."""
    with pytest.raises(InvalidInput, match=r"image is no readable image.*PNG, JPEG") as caught:
        read_image(data)
    assert caught.value.fields == {"field": "image"}


@pytest.mark.parametrize("side", [6_000, 60_000])
def test_a_picture_of_too_many_pixels_is_refused_unread(side: int) -> None:
    """The header alone decides: nothing of 3.6 gigapixels is ever allocated."""
    with pytest.raises(InvalidInput, match=f"{side * side} pixels"):
        read_image(huge_png(side))


def test_a_file_of_too_many_bytes_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a decoder sees it."""
    monkeypatch.setattr(_video, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(InvalidInput, match="at most 100 are read"):
        read_image(EXAMPLE)


def test_a_video_holds_the_frames_it_was_written_from() -> None:
    """All of them, in order, close to what they were."""
    frames = moving_square()
    decoded = read_mp4(write_mp4(frames, 8))
    assert decoded.shape == frames.shape
    # Chroma is halved in both directions, so that colours differ at edges; brightness must not.
    brightness = frames.astype(float).mean(-1) - decoded.astype(float).mean(-1)
    assert np.abs(brightness).mean() < 4


def test_the_same_frames_give_the_same_bytes() -> None:
    """Whatever lies in the process's memory; x264's macroblock tree made this fail."""
    frames = moving_square()
    rng = np.random.default_rng(1)
    versions = set[bytes]()
    for _ in range(20):
        versions.add(write_mp4(frames, 8))
        rubbish = [rng.bytes(int(size)) for size in rng.integers(1000, 400_000, 20)]
        del rubbish
    assert len(versions) == 1


def test_a_contact_sheet_shows_every_frame_enlarged() -> None:
    """Each pixel of each frame stands where rows and columns put it."""
    frames = moving_square()
    with Image.open(io.BytesIO(contact_sheet(frames, columns=3, magnify=4, gap=6))) as image:
        sheet = np.asarray(image.convert("RGB"))
    assert sheet.shape == (3 * (256 + 6) + 6, 3 * (256 + 6) + 6, 3)
    for index, frame in enumerate(frames):
        top, left = 6 + index // 3 * 262, 6 + index % 3 * 262
        assert np.array_equal(sheet[top : top + 256 : 4, left : left + 256 : 4], frame)
    assert (sheet[:6] == 96).all()
