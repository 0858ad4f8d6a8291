"""Models on the meta device, from descriptions that may say anything."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from vit2linear.errors import UnsupportedModelError, Vit2LinearError
from vit2linear.sources._description import first_line

MOST_MODULES = 4_000
"""The largest of timm's models have 2,000."""


def outline(what: str, create: Callable[[], nn.Module]) -> nn.Module:
    """What ``create`` makes, on the meta device; its arguments come from a file, so that it may fail in any way.

    Raises:
        UnsupportedModelError: it cannot be built, or has more modules than any model, as a depth of a billion would.
    """
    count = 0

    def counted(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise UnsupportedModelError(f"{what} has more than {MOST_MODULES:,} modules.", "Check its depth.")

    handle = register_module_module_registration_hook(counted)
    try:
        with torch.device("meta"):
            return create()
    except Vit2LinearError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{what} cannot be built: {first_line(error)}.", "Check the sizes in config.json, or upgrade timm."
        ) from error
    finally:
        handle.remove()
