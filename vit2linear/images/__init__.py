"""Sets of images: whatever holds them (folders, archives, tables, the Hub), behind two small shapes.

``ImageList`` has random access (everything local); ``ImageStream`` is read in order (sets on the Hub). Both give the
encoded bytes, so that a held-out image is chosen by its content. One file for each kind of place: ``folders``,
``archives``, ``tables``, ``streams``; ``opening`` chooses by what the path is.
"""

from vit2linear.images.opening import DEFAULT_NOTE, ImageOptions, on_hub, open_images
from vit2linear.images.sets import (
    EXTENSIONS,
    HeldOut,
    ImageList,
    Images,
    ImageSets,
    ImageStream,
    Reader,
    content_digest,
)
from vit2linear.images.streams import DEFAULT_SET

__all__ = [
    "DEFAULT_NOTE",
    "DEFAULT_SET",
    "EXTENSIONS",
    "HeldOut",
    "ImageList",
    "ImageOptions",
    "ImageSets",
    "ImageStream",
    "Images",
    "Reader",
    "content_digest",
    "on_hub",
    "open_images",
]
