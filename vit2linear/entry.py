"""The architecture name that artifacts carry, as timm's registry wants it: a function called ``vit2linear``.

Light and free of imports, because it is registered in the middle of somebody's ``import timm``.
"""

from __future__ import annotations

from typing import Any


def vit2linear(pretrained: bool = False, **kwargs: Any) -> Any:
    """timm entry point of converted models; see ``vit2linear.model.build``."""
    from vit2linear.model import build

    return build(pretrained, **kwargs)


def register(timm: Any) -> None:
    """Make ``vit2linear`` known to timm; called once timm has been imported."""
    timm.models.register_model(vit2linear)
