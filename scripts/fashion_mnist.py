"""Write Fashion-MNIST as image sets that ``--data`` reads: one to learn from and choose by, one to report.

Run ``python scripts/fashion_mnist.py IDX_DIR data`` where IDX_DIR holds the four gzip IDX files (for example
``/usr/share/datasets/fashion-mnist`` of the Debian package ``dataset-fashion-mnist``). It writes folders of tables:

- ``data/fashion-mnist``: ``train``, 55,000 of the training images, and ``validation``, the other 5,000, drawn with a
  fixed seed. Settings are chosen on them.
- ``data/fashion-mnist-few``: the same, with 4,000 of the images to learn from.
- ``data/fashion-mnist-test``: ``test``, the 10,000 test images. A set always has images to learn from as well; here
  they are the 5,000 once more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import datasets
import numpy as np
from train_demo import CLASSES, png, read_idx

VALIDATION = 5000
FEW = 4000
SEED = 0


def write_table(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """One split: images (count, height, width) and labels (count,), both uint8, as a table of PNG files."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})
    rows = {"image": [{"bytes": png(image), "path": None} for image in images], "label": labels.tolist()}
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    print(f"{path}: {len(images):,} images")


def write_sets(idx: Path, output: Path) -> None:
    """All folders, from the IDX files in ``idx``."""
    images, labels = read_idx(idx, "train")
    order = np.random.default_rng(SEED).permutation(len(images))
    validation, train = np.sort(order[:VALIDATION]), np.sort(order[VALIDATION:])
    report = output / "fashion-mnist-test"
    name = "{}-00000-of-00001.parquet".format
    for folder, learn in ((output / "fashion-mnist", train), (output / "fashion-mnist-few", np.sort(order[-FEW:]))):
        write_table(folder / name("train"), images[learn], labels[learn])
        write_table(folder / name("validation"), images[validation], labels[validation])
    write_table(report / name("train"), images[validation], labels[validation])
    write_table(report / name("test"), *read_idx(idx, "test"))


def main() -> None:
    """Write all sets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("idx", type=Path, help="folder with the four gzip IDX files")
    parser.add_argument("output", type=Path, help="folder in which the sets are made")
    args = parser.parse_args()
    datasets.disable_progress_bars()
    write_sets(args.idx, args.output)


if __name__ == "__main__":
    main()
