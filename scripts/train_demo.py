"""Train and package the demo source: a small ViT on Fashion-MNIST.

Run ``python scripts/train_demo.py FASHION_MNIST_DIR`` where the folder holds the four gzip IDX files of Fashion-MNIST
(for example the Debian package ``dataset-fashion-mnist``, under ``/usr/share/datasets/fashion-mnist``). It writes
``vit2linear/demo/``: a timm-layout checkpoint (``config.json``, ``model.safetensors`` in float16) and the images that
ship with it (``data/train-*.parquet``, ``data/test-*.parquet``: the first images of each split).

Recipe: ViT with a class token, 28 px, patch 4, 1 channel, width 96, 6 blocks, 4 heads, MLP ratio 2; random horizontal
flip and random shift of up to 1 px; AdamW (weight decay 0.05), one cycle to 2e-3, batch 256, clip 1.0, 28 epochs;
seed 0. Trained on all 60,000 training images; the 10,000 test images are only ever read for the last figure.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import time
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
ARCHITECTURE = "vit_tiny_patch16_224"
MODEL_ARGS: dict[str, Any] = {
    "img_size": 28,
    "patch_size": 4,
    "in_chans": 1,
    "embed_dim": 96,
    "depth": 6,
    "num_heads": 4,
    "mlp_ratio": 2.0,
}
MEAN, STD = 0.2860, 0.3530
SHIPPED = {"train": 4000, "test": 2000}


def read_idx(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 28, 28) and labels (count,), both uint8, from the gzip IDX files."""
    prefix = {"train": "train", "test": "t10k"}[split]
    images = gzip.decompress((folder / f"{prefix}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / f"{prefix}-labels-idx1-ubyte.gz").read_bytes())[8:]
    return np.frombuffer(images, np.uint8).reshape(-1, 28, 28), np.frombuffer(labels, np.uint8)


def to_input(images: Tensor) -> Tensor:
    """uint8 (batch, 28, 28) to normalised float (batch, 1, 28, 28)."""
    return (images[:, None].float() / 255 - MEAN) / STD


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """One random flip and one random shift of up to 1 px for each image; shapes unchanged."""
    count = images.shape[0]
    flip = torch.rand(count, generator=generator) < 0.5
    images = torch.where(flip[:, None, None], images.flip(-1), images)
    padded = F.pad(images, (1, 1, 1, 1))
    dy, dx = torch.randint(0, 3, (2, count, 1, 1), generator=generator)
    rows, columns = torch.arange(28)[None, :, None] + dy, torch.arange(28)[None, None, :] + dx
    return padded[torch.arange(count)[:, None, None], rows, columns]


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 in per cent."""
    model.eval()
    pairs = zip(images.split(500), labels.split(500), strict=True)
    hits = torch.cat([model(to_input(x)).argmax(1) == y for x, y in pairs])
    return 100 * float(hits.float().mean())


def train(images: Tensor, labels: Tensor, epochs: int, seed: int) -> nn.Module:
    """Train from scratch on ``images`` (count, 28, 28) uint8."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model: nn.Module = timm.create_model(ARCHITECTURE, num_classes=len(CLASSES), **MODEL_ARGS)
    steps = len(images) // 256
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * steps, pct_start=0.15)
    for epoch in range(epochs):
        model.train()
        start, total = time.perf_counter(), 0.0
        for batch in torch.randperm(len(images), generator=generator)[: steps * 256].split(256):
            logits = model(to_input(augment(images[batch], generator)))
            loss = F.cross_entropy(logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{epochs} loss {total / steps:.4f} {time.perf_counter() - start:.0f} s", flush=True)
    return model


def png(image: np.ndarray) -> bytes:
    """One grey image as PNG bytes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def package(output: Path, model: nn.Module, splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Write the timm-layout checkpoint and the shipped images."""
    (output / "data").mkdir(parents=True, exist_ok=True)
    config = {
        "architecture": ARCHITECTURE,
        "num_classes": len(CLASSES),
        "num_features": MODEL_ARGS["embed_dim"],
        "global_pool": "token",
        "label_names": CLASSES,
        "model_args": MODEL_ARGS,
        "pretrained_cfg": {
            "tag": "fashion_mnist",
            "input_size": [1, 28, 28],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "mean": [MEAN],
            "std": [STD],
            "num_classes": len(CLASSES),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": "apache-2.0",
        },
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    for split, (images, labels) in splits.items():
        rows = [{"image": {"bytes": png(images[i])}, "label": int(labels[i])} for i in range(SHIPPED[split])]
        path = output / "data" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows, features=features).to_parquet(path)


def main() -> None:
    """Train, package, and print the accuracy of the packaged float16 weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the four gzip IDX files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "vit2linear" / "demo")
    parser.add_argument("--epochs", type=int, default=28)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    splits = {split: read_idx(args.data, split) for split in SHIPPED}
    tensors = {name: (torch.tensor(x), torch.tensor(y).long()) for name, (x, y) in splits.items()}
    model = train(*tensors["train"], args.epochs, args.seed)
    package(args.output, model, splits)
    packaged = timm.create_model(f"local-dir:{args.output}", pretrained=True)
    images, labels = tensors["test"]
    print(f"packaged weights, 10,000 test images: {accuracy(packaged, images, labels):.2f}%")
    print(f"packaged weights, 2,000 shipped test images: {accuracy(packaged, images[:2000], labels[:2000]):.2f}%")


if __name__ == "__main__":
    main()
