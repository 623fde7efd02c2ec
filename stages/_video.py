"""Owner of PyAV and Pillow: images in, videos and contact sheets out."""

import io
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from onepiece import ConfigError, InvalidInput

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES: Final = 32 * 2**20
MAX_IMAGE_PIXELS: Final = 32 * 2**20
IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "GIF")

_ACCEPTED: Final = "send the bytes of a PNG, JPEG, WebP, BMP or GIF file"

Frames = npt.NDArray[np.uint8]
"""[frames, height, width, 3]"""


def read_image(data: bytes, field: str = "image") -> "Image":
    """Decode an image that came from outside, upright and as RGB.

    Raises:
        InvalidInput: No image, a damaged one, or one of too many bytes or pixels; ``field`` is named.
    """
    image_module = _pillow()
    from PIL import ImageOps, UnidentifiedImageError

    if len(data) > MAX_IMAGE_BYTES:
        raise _refuse(field, f"has {len(data)} bytes; at most {MAX_IMAGE_BYTES} are read")
    try:
        with image_module.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            _check_pixels(field, image.width * image.height)
            upright: Image = ImageOps.exif_transpose(image).convert("RGB")
            return upright
    except InvalidInput:
        raise
    except Exception as error:
        # Decoders raise whatever comes to pass in a hostile file: OSError, SyntaxError, struct.error, ...
        given = f"{len(data)} bytes that start with {data[:12]!r}"
        if isinstance(error, UnidentifiedImageError):  # its text names our buffer, and says no more than ours
            raise _refuse(field, f"is no readable image: {given}") from error
        raise _refuse(field, f"is no readable image ({given}): {error}") from error


def _check_pixels(field: str, pixels: int) -> None:
    """The header says the size, so that a small file that unpacks to gigabytes is refused unread."""
    if pixels > MAX_IMAGE_PIXELS:
        raise _refuse(field, f"has {pixels} pixels; at most {MAX_IMAGE_PIXELS} are read")


def _refuse(field: str, complaint: str) -> InvalidInput:
    return InvalidInput(f"{field} {complaint}; {_ACCEPTED}", field=field)


def write_mp4(frames: Frames, frames_per_second: int) -> bytes:
    """Encode frames as H.264 in mp4; the same frames give the same bytes.

    For that, x264 gets one thread (with several it decides by timing) and no macroblock tree: with it,
    the same small frames came out in up to 30 versions in 80 tries, which differed with what the process
    had in its memory before.
    """
    av = _pyav()
    count, height, width, channels = frames.shape
    assert count > 0
    assert channels == 3
    file = io.BytesIO()
    with av.open(file, mode="w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(frames_per_second))
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv420p"  # the one format every player shows
        stream.codec_context.thread_count = 1
        stream.options = {"crf": "14", "preset": "medium", "x264-params": "mbtree=0"}
        for pixels in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return file.getvalue()


def read_mp4(data: bytes) -> Frames:
    """All frames of a video."""
    av = _pyav()
    with av.open(io.BytesIO(data), mode="r") as container:
        frames = [picture.to_ndarray(format="rgb24") for picture in container.decode(video=0)]
    return np.stack(frames)


def contact_sheet(frames: Frames, *, columns: int, magnify: int, gap: int = 6) -> bytes:
    """All frames on one PNG, each pixel ``magnify`` times as wide and high, on a grey ground."""
    image_module = _pillow()
    large = frames.repeat(magnify, axis=1).repeat(magnify, axis=2)
    count, height, width, _ = large.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, 3)
    sheet = np.full(shape, 96, dtype=np.uint8)
    for index, pixels in enumerate(large):
        top = gap + index // columns * (height + gap)
        left = gap + index % columns * (width + gap)
        sheet[top : top + height, left : left + width] = pixels
    file = io.BytesIO()
    image_module.fromarray(sheet).save(file, format="PNG")
    return file.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing("Pillow") from error
    return Image


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise _missing("PyAV") from error
    return av


def _missing(what: str) -> ConfigError:
    return ConfigError(f"{what} is not installed; pip install -e '.[diffusion]'")
