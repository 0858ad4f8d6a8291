"""Turn a pretrained Softmax Vision Transformer into a linear-attention one.

Importing this package is light (no torch) and makes timm know the architecture of converted models, whichever of the
two is imported first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wrapt

from vit2linear import entry, errors
from vit2linear.recipe import Recipe

if TYPE_CHECKING:
    from vit2linear.finished import evaluate as evaluate
    from vit2linear.finished import load as load
    from vit2linear.pipeline import convert as convert
    from vit2linear.surgery import linearize as linearize

__version__ = "0.1.0"
__all__ = ["Recipe", "convert", "errors", "evaluate", "linearize", "load"]

_LAZY = {
    "convert": "vit2linear.pipeline",
    "evaluate": "vit2linear.finished",
    "linearize": "vit2linear.surgery",
    "load": "vit2linear.finished",
}


def __getattr__(name: str) -> Any:
    """Import the public functions when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module 'vit2linear' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


wrapt.register_post_import_hook(entry.register, "timm")
