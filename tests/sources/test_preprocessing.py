"""Every image processor of the library against timm's transforms, on a drawn photograph and on real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from PIL import Image, ImageDraw
from timm.data import create_transform
from torch import Tensor

from tests.sources.oracles import make
from tests.test_sources import load
from vit2linear.errors import UnsupportedModelError
from vit2linear.sources._preprocessing import data_config

VIT = {"image_processor_type": "ViTImageProcessor"}
SQUARE = {"height": 32, "width": 32}
PROCESSORS: dict[str, Any] = {
    "vit": lambda: tf.ViTImageProcessor(size=SQUARE),
    "vit-bicubic": lambda: tf.ViTImageProcessor(size=SQUARE, resample=3),
    "vit-lanczos": lambda: tf.ViTImageProcessor(size=SQUARE, resample=1),
    "vit-not-normalised": lambda: tf.ViTImageProcessor(size=SQUARE, do_normalize=False),
    "vit-oblong": lambda: tf.ViTImageProcessor(size={"height": 24, "width": 40}),
    "deit": lambda: tf.DeiTImageProcessor(size={"height": 36, "width": 36}, crop_size=SQUARE),
    "deit-default": tf.DeiTImageProcessor,
    "bit": lambda: tf.BitImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE),
    "beit": lambda: tf.BeitImageProcessor(size=SQUARE),
    "beit-cropped": lambda: tf.BeitImageProcessor(
        size={"height": 41, "width": 41}, crop_size=SQUARE, do_center_crop=True
    ),
    "clip": lambda: tf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE),
    "clip-pil": lambda: tf.CLIPImageProcessorPil(size={"shortest_edge": 34}, crop_size=SQUARE),
    "chinese-clip": lambda: tf.ChineseCLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE),
    "siglip": lambda: tf.SiglipImageProcessor(size=SQUARE),
    "dinov3": lambda: tf.DINOv3ViTImageProcessor(size=SQUARE),
    "convnext": lambda: tf.ConvNextImageProcessor(size={"shortest_edge": 40}, crop_pct=0.9),
    "convnext-squashed": lambda: tf.ConvNextImageProcessor(size={"shortest_edge": 384}),
}


def photograph(width: int, height: int) -> Image.Image:
    """Slopes, edges and a little noise."""
    rows, columns = np.mgrid[0:height, 0:width]
    slopes = [127 + 90 * np.sin(rows / 37 + c) * np.cos(columns / 53) for c in range(3)]
    noise = np.random.default_rng(0).normal(0, 6, (height, width, 3))
    image = Image.fromarray((np.stack(slopes, -1) + noise).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    draw.ellipse((width // 8, height // 6, width // 2, height // 2), fill=(200, 60, 30))
    draw.rectangle((width // 2, height // 3, width - width // 6, height - height // 5), fill=(20, 90, 160))
    return image


def both(processor: Any, image: Image.Image, folder: Path) -> tuple[Tensor, Tensor]:
    """timm's pixels by the file that the processor saves, and the processor's own."""
    processor.save_pretrained(folder)
    stated = json.loads((folder / "preprocessor_config.json").read_text())
    cfg, note = data_config(stated, VIT, "vit", 3, 32)
    assert "preprocessor_config.json" in note
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    return create_transform(**cfg)(image), theirs


@pytest.mark.parametrize("name", PROCESSORS)
# Where a margin leaves 3 after division by 4, the library's crop is a pixel further left or up than torchvision's.
@pytest.mark.parametrize("size", [(200, 150), (96, 140)])
def test_equals_the_image_processor(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    mine, theirs = both(PROCESSORS[name](), photograph(*size), tmp_path)
    assert mine.shape == theirs.shape
    # The library resizes in uint8 with torch, timm with PIL: a level of 255 apart, more where DINOv3 resizes floats.
    assert (mine - theirs).abs().max() < (0.2 if name == "dinov3" else 0.06)
    assert (mine - theirs).abs().mean() < 0.01


@pytest.mark.real
@pytest.mark.parametrize("name", PROCESSORS)
def test_equals_the_image_processor_on_photographs(name: str, real: Path, tmp_path: Path) -> None:
    for path in sorted((real / "photos").iterdir())[:3]:
        mine, theirs = both(PROCESSORS[name](), Image.open(path).convert("RGB"), tmp_path)
        gaps = [
            (mine[:, :-1, :-1] - other).abs() for other in (theirs[:, :-1, :-1], theirs[:, 1:, :-1], theirs[:, :-1, 1:])
        ]
        shift, gap = min(enumerate(gaps), key=lambda item: float(item[1].mean()))
        print(f"{name}, {path.name}: largest difference {gap.max():.3f}, mean {gap.mean():.4f}, shift {bool(shift)}")
        assert gap.mean() < 0.01


def test_naflex_is_read_as_a_square(tmp_path: Path) -> None:
    processor = tf.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    processor.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "preprocessor_config.json").read_text())
    cfg, _ = data_config(stated, VIT, "siglip2", 3, 32)
    image = photograph(120, 120)
    patches = processor(image, return_tensors="pt")["pixel_values"][0]
    theirs = patches.reshape(4, 4, 8, 8, 3).permute(4, 0, 2, 1, 3).reshape(3, 32, 32)
    assert (create_transform(**cfg)(image) - theirs).abs().max() < 0.06


@pytest.mark.parametrize(
    ("kind", "legacy", "modern"),
    [
        ("ViT", {"size": 32}, {"size": SQUARE}),
        (
            "DeiT",
            {"size": 36, "crop_size": 32, "do_center_crop": True},
            {"size": {"height": 36, "width": 36}, "crop_size": SQUARE},
        ),
        ("CLIP", {"size": 40, "crop_size": 32}, {"size": {"shortest_edge": 40}, "crop_size": SQUARE}),
        ("Siglip", {"size": [32, 32]}, {"size": SQUARE}),
    ],
)
def test_files_of_old_feature_extractors(kind: str, legacy: dict[str, Any], modern: dict[str, Any]) -> None:
    old = data_config({"feature_extractor_type": f"{kind}FeatureExtractor", **legacy}, VIT, "vit", 3, 32)[0]
    new = data_config({"image_processor_type": f"{kind}ImageProcessorFast", **modern}, VIT, "vit", 3, 32)[0]
    assert old == new


def test_crops_are_exact_at_every_size() -> None:
    for crop in (32, 224, 336, 378, 518):
        for resize in range(crop, crop + 80):
            stated = {
                "size": {"shortest_edge": resize},
                "crop_size": crop,
                "image_processor_type": "CLIPImageProcessor",
            }
            cfg, _ = data_config(stated, VIT, "clip", 3, crop)
            assert int(crop / cfg["crop_pct"]) == resize


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"image_processor_type": "LevitImageProcessor"}, "Supported processors: ViTImageProcessor, DeiT"),
        ({"rescale_factor": 1.0}, "does not scale pixels by 1/255"),
        ({"do_rescale": False}, "does not scale pixels by 1/255"),
        ({"do_resize": False}, "does not resize to one size"),
        ({"do_pad": True}, "does not resize to one size"),
        ({"size": {"longest_edge": 32}}, "a size with longest_edge"),
        ({"size": {"shortest_edge": 32}}, "shorter side without a crop"),
        ({"size": SQUARE, "crop_size": {"height": 24, "width": 32}, "do_center_crop": True}, "of another shape"),
    ],
)
def test_what_timm_cannot_do_is_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        data_config(stated, VIT, "vit", 3, 32)


@pytest.mark.parametrize(
    ("name", "interpolation", "mode", "mean"),
    [
        ("vit", "bilinear", "squash", 0.5),
        ("dinov2-model", "bicubic", "center", 0.485),
        ("dinov3_vit", "bilinear", "squash", 0.485),
        ("clip", "bicubic", "center", 0.48145466),
        ("siglip", "bicubic", "squash", 0.5),
        ("siglip2", "bilinear", "squash", 0.5),
    ],
)
def test_without_a_file(name: str, interpolation: str, mode: str, mean: float, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    cfg = loaded.spec.pretrained_cfg
    assert "no preprocessor_config.json" in loaded.spec.notes[0]
    assert cfg["input_size"] == (3, 32, 32) and cfg["crop_pct"] == 1.0 and cfg["mean"][0] == mean
    assert (cfg["interpolation"], cfg["crop_mode"]) == (interpolation, mode)


def test_the_processor_may_be_part_of_a_larger_one(tmp_path: Path) -> None:
    make("clip").save_pretrained(tmp_path)
    processor = tf.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=SQUARE).to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    assert load(tmp_path).spec.pretrained_cfg["crop_pct"] == 0.8
