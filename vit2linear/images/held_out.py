"""Without a validation split: the images whose content hashes are smallest are never trained on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vit2linear.errors import DataError
from vit2linear.images.sets import ImageList, Images, ImageSets, ImageStream, content_digest
from vit2linear.images.streams import RowStream

SHARE = 0.05
_LAST = "f" * 16


def hold_out(path: str, images: Images, threshold: str | None) -> ImageSets:
    """Split off the images whose content hash is at most ``threshold``; default: 5%.

    Raises:
        DataError: one image only, or a threshold that holds out none or all.
    """
    if isinstance(images, ImageStream):
        threshold = threshold or f"{int(SHARE * 2**64):016x}"
        assert isinstance(images.start, RowStream)
        train = replace(images.start, keep=_Digest(threshold, False))
        kept = replace(images.start, keep=_Digest(threshold, True), shuffle_seed=None)
        validation = replace(images, name=f"{images.name}, held-out 5%", start=kept)
        return ImageSets(path, replace(images, start=train), validation, threshold)
    if images.size < 2:
        raise DataError(f"--data: {path!r} holds {images.size} image; at least 2 are needed, one is held out.")
    digests = [_digest(images, i) for i in range(images.size)]
    threshold = threshold or sorted(digests)[max(1, round(SHARE * images.size)) - 1]
    if threshold == _LAST:
        raise DataError(f"--data: no image of {path!r} can be read.", "Check the files, and that you may read them.")
    held = [i for i, d in enumerate(digests) if d <= threshold]
    rest = [i for i, d in enumerate(digests) if d > threshold]
    if not held or not rest:
        raise DataError(
            f"--data: {path!r} is not the set that this model was distilled on: no image of it was held out."
        )
    train_name, validation_name = f"{images.name}, without held-out", f"{images.name}, held-out 5%"
    return ImageSets(path, images.subset(rest, train_name), images.subset(held, validation_name), threshold)


def _digest(images: ImageList, i: int) -> str:
    """An image that cannot be read is left to the loader, which counts it."""
    try:
        return content_digest(images.read(i)[0])
    except OSError:
        return _LAST


@dataclass(frozen=True)
class _Digest:
    threshold: str
    held_out: bool

    def __call__(self, data: bytes) -> bool:
        return (content_digest(data) <= self.threshold) is self.held_out
