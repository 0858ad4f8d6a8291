"""Decoding of whatever users bring; every image here is a real file of its kind."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.test_data import CONFIG
from vit2linear.errors import BadImageError
from vit2linear.views import eval_view, train_view

GREY = {**CONFIG, "input_size": (1, 32, 32), "mean": (0.5,), "std": (0.5,)}
RAMP = np.linspace(0, 1, 32 * 32).reshape(32, 32)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def seen(data: bytes, config: dict[str, Any] = GREY) -> np.ndarray[Any, Any]:
    """What the model is shown, as 0 to 1, (channels, 32, 32)."""
    return eval_view(config)(data, "x").numpy() / 2 + 0.5


@pytest.mark.parametrize(
    "data",
    [
        encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "PNG"),
        encoded(Image.fromarray((RAMP * 65535).astype(np.uint16)), "TIFF"),
        encoded(Image.fromarray((RAMP * 65535).astype(">u2")), "TIFF"),
        encoded(Image.fromarray((RAMP * 65535).astype(np.int32)), "TIFF"),
        b"P5 32 32 4095\n" + (RAMP * 4095).astype(">u2").tobytes(),
        encoded(Image.fromarray(((RAMP - 0.5) * 2**31).astype(np.int32)), "TIFF"),
        encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"),
        encoded(Image.fromarray((RAMP * 255).astype(np.float32)), "TIFF"),
        encoded(Image.fromarray((RAMP * 3000 - 1000).astype(np.float32)), "TIFF"),
    ],
    ids=["png16", "tiff16", "tiff16 big-endian", "int16", "pgm12", "int32", "float 1", "float 255", "float own range"],
)
def test_deep_greyscale_is_scaled_not_clipped(data: bytes) -> None:
    assert Image.open(io.BytesIO(data)).mode[0] in "IF"
    for config in (GREY, CONFIG):
        assert np.abs(seen(data, config) - RAMP).max() < 0.01


def test_a_faint_16_bit_image_stays_faint_and_a_flat_one_is_no_division_by_zero() -> None:
    assert seen(encoded(Image.fromarray((RAMP * 655).astype(np.uint16)), "PNG")).max() < 0.02
    for value in (0.0, -7.0, 1e9):
        assert np.isfinite(seen(encoded(Image.fromarray(np.full((4, 4), value, np.float32)), "TIFF"))).all()
    with pytest.raises(BadImageError, match="x cannot be used: cannot be decoded: pixels that are not finite"):
        seen(encoded(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"))


def colours() -> dict[str, tuple[bytes, tuple[int, int, int]]]:
    """Encoded image and the colour that it has everywhere."""
    size, orange = (40, 50), (200, 100, 50)
    palette = Image.new("P", size, 1)
    palette.putpalette([0, 0, 0, *orange])
    cmyk = Image.new("RGB", size, orange).convert("CMYK")
    frames = [Image.new("RGB", size, c) for c in (orange, (0, 0, 255))]
    rgb = Image.new("RGB", size, orange)
    return {
        "cmyk tiff": (encoded(cmyk, "TIFF"), orange),
        "cmyk jpeg": (encoded(cmyk, "JPEG", quality=100, subsampling=0), orange),
        "palette": (encoded(palette, "PNG"), orange),
        "palette, one colour transparent": (encoded(palette, "PNG", transparency=1), orange),
        "palette, alpha for each colour": (encoded(palette, "PNG", transparency=b"\x00\x20"), orange),
        "rgba": (encoded(Image.new("RGBA", size, (*orange, 0)), "PNG"), orange),
        "grey and alpha": (encoded(Image.new("LA", size, (90, 10)), "PNG"), (90, 90, 90)),
        "1 bit": (encoded(Image.new("1", size, 1), "TIFF"), (255, 255, 255)),
        "gif": (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), orange),
        "webp": (encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True), orange),
        "png": (encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]), orange),
        "tiff": (encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]), orange),
        "avif": (encoded(rgb, "AVIF", quality=100), orange),
        "bmp": (encoded(rgb, "BMP"), orange),
    }


@pytest.mark.parametrize("kind", colours())
def test_every_kind_becomes_the_models_channels(kind: str) -> None:
    data, colour = colours()[kind]
    wanted = np.array(colour) / 255
    assert np.abs(seen(data, CONFIG) - wanted[:, None, None]).max() < 0.02
    grey = float(wanted @ [0.299, 0.587, 0.114])
    assert seen(data).shape == (1, 32, 32) and np.abs(seen(data) - grey).max() < 0.02


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(kind: str, orientation: int) -> None:
    corners = np.zeros((32, 32, 3), np.uint8)
    corners[:16, :16], corners[:16, 16:], corners[16:, :16] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    upright = Image.fromarray(corners)
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that the orientation undoes
    turned = upright.transpose(Image.Transpose(back[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    options: dict[str, Any] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    shown = seen(encoded(turned, kind, exif=exif, **options), CONFIG)
    for y, x in ((4, 4), (4, 28), (28, 4), (28, 28)):
        assert np.abs(shown[:, y, x] - corners[y, x] / 255).max() < 0.05


def test_damaged_exif_data_do_not_make_an_image_bad() -> None:
    image = Image.new("RGB", (40, 40), (200, 100, 50))
    for exif in (
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09\x01",
        b"Exif\x00\x00" + bytes(range(40)),
        b"Exif\x00\x00",
    ):
        assert np.abs(seen(encoded(image, "JPEG", exif=exif), CONFIG)[0] - 200 / 255).max() < 0.02


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (1, 60), (3, 1)])
@pytest.mark.parametrize("augment", ["mild", "flip", "none"])
@pytest.mark.parametrize("crop", [{}, {"crop_pct": 0.875}, {"crop_mode": "squash"}, {"crop_mode": "border"}])
def test_tiny_images(size: tuple[int, int], augment: str, crop: dict[str, Any]) -> None:
    data = encoded(Image.new("RGB", size, (255, 255, 255)), "PNG")
    random.seed(0), torch.manual_seed(0)
    for _ in range(5):
        assert train_view({**CONFIG, **crop}, augment)(data, "x").shape == (3, 32, 32)


def png_of(width: int, height: int) -> bytes:
    """A well-formed black 8-bit PNG of any size, hundreds of pixels for each byte."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    pack, row = zlib.compressobj(1), bytes(width + 1)
    pixels = b"".join([*(pack.compress(row) for _ in range(height)), pack.flush()])
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def peak_kilobytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ((10_000, 10_000), "more than 89,478,485 pixels"),  # of which PIL only warns
        ((16_000, 16_000), "more than 89,478,485 pixels"),
        ((1, 200_000), "1x200000 pixels, too narrow to be resized"),
    ],
)
def test_decompression_bombs_never_take_the_memory(size: tuple[int, int], reason: str) -> None:
    data = png_of(*size)
    assert len(data) < 2_000_000
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = peak_kilobytes()
    for view in (eval_view(CONFIG), train_view(CONFIG, "mild")):
        with pytest.raises(BadImageError, match=f"x cannot be used: {reason}"):
            view(data, "x")
    assert peak_kilobytes() - before < 30_000


def test_a_large_photo_is_no_bomb() -> None:
    assert eval_view(CONFIG)(png_of(3000, 2000), "x").shape == (3, 32, 32)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "AVIF", "PPM"])
def test_damaged_files_are_bad_images_and_nothing_else(kind: str) -> None:
    rng = random.Random(kind)
    noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
    data = encoded(Image.fromarray(noise), kind, exif=Image.Exif())
    view = eval_view(CONFIG)
    bad = 0
    for i in range(150):
        damaged = bytearray(data)
        if i % 3:
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(data) if i % 2 else min(64, len(data)))] = rng.randrange(256)
        else:
            del damaged[rng.randrange(len(data)) :]
        try:
            assert view(bytes(damaged), "x").shape == (3, 32, 32)
        except BadImageError as error:
            bad += 1
            assert error.name == "x" and "\n" not in error.reason
    assert bad > 30


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "an empty file"),
        (b"not an image", "no image that can be decoded"),
        (b"<html>404</html>", "no image that can be decoded"),
        (encoded(Image.new("RGB", (40, 40)), "PNG")[:-60], "cannot be decoded"),
        (encoded(Image.new("RGB", (400, 400), 7), "JPEG")[:500], "cannot be decoded: Truncated"),
    ],
    ids=["empty", "text", "page", "png", "jpeg"],
)
def test_reasons(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError, match=f"x cannot be used: .*{reason}"):
        seen(data, CONFIG)
