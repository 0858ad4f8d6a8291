"""Encoded bytes to the model's input: decoding of whatever users bring, then the source's own preprocessing."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import Compose, RandomHorizontalFlip

from vit2linear.errors import BadImageError

PIXELS = Image.MAX_IMAGE_PIXELS or 89_478_485
"""An image of more pixels, as it is or once it is resized, is not decoded: it would take gigabytes."""

_FULL_SCALE = {"I": (65535,), "F": (1, 255)}


@dataclass(frozen=True)
class View:
    """Encoded bytes to a normalised tensor (channels, height, width)."""

    transform: Callable[[Image.Image], Tensor]
    input_size: tuple[int, int, int]
    """Channels, height, width."""

    def __call__(self, data: bytes, where: str) -> Tensor:
        """Decode, turn upright as its EXIF data say, convert to the model's channels, transform.

        Greyscale of more than 8 bits is scaled: 16 bits from 0-65535; 32-bit integers likewise, floats from 0-1 or
        0-255, and both from their own smallest and largest value where they leave that range. Transparency is dropped
        as PIL's ``convert("RGB")`` does, and of an animation the first frame is taken.

        Raises:
            BadImageError: no image, a damaged one, or one that would take too much memory; ``where`` names it.
        """
        channels, height, width = self.input_size
        try:
            image = _decode(data, "L" if channels == 1 else "RGB")
        except UnidentifiedImageError as error:
            raise BadImageError(where, "no image that can be decoded" if data else "an empty file") from error
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise BadImageError(where, f"more than {PIXELS:,} pixels") from error
        except Exception as error:  # what PIL's readers raise for damaged files has no common base
            raise BadImageError(where, f"cannot be decoded: {error or type(error).__name__}") from error
        # Preprocessing fits the shorter side to the input.
        if max(image.size) / min(image.size) * height * width > PIXELS:
            raise BadImageError(where, f"{image.width}x{image.height} pixels, too narrow to be resized")
        return self.transform(image)


def eval_view(data_config: dict[str, Any]) -> View:
    """The source's own preprocessing (timm's data configuration)."""
    return View(create_transform(**data_config, is_training=False), data_config["input_size"])


def train_view(data_config: dict[str, Any], augment: str) -> View:
    """``mild``: random resized crop and flip; ``flip``: the evaluation view or its mirror; ``none``: that view."""
    if augment == "none":
        return eval_view(data_config)
    if augment == "flip":
        view = eval_view(data_config)
        return View(Compose([RandomHorizontalFlip(), view.transform]), view.input_size)
    transform = create_transform(
        input_size=data_config["input_size"],
        is_training=True,
        scale=(0.7, 1.0),
        color_jitter=0.0,
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
    )
    return View(transform, data_config["input_size"])


def _decode(data: bytes, mode: str) -> Image.Image:
    with warnings.catch_warnings():
        # Damaged EXIF data and the like: the pixels are there, or decoding raises.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        image = _upright(Image.open(io.BytesIO(data)))
        return (_to_8_bits(image) if image.mode[0] in "IF" else image).convert(mode)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF data that cannot be read; if it is the pixels, converting them raises as well
        return image


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Greyscale of modes I;16 (and its byte orders), I and F; PIL's own conversion turns all above 255 white."""
    values = np.asarray(image).astype(np.float32)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite([low, high]).all():
        raise ValueError("pixels that are not finite")
    fits = [top for top in _FULL_SCALE[image.mode[0]] if low >= 0 and high <= top]
    black, white = (0, fits[0]) if fits else (low, high)
    values -= black
    values *= 255 / (white - black or 1)
    return Image.fromarray(values.round(out=values).astype(np.uint8))
