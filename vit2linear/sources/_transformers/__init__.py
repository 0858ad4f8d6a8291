"""The model types of the transformers layout: one file per family, found by scanning this folder."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from vit2linear.errors import UnsupportedModelError
from vit2linear.sources._transformers.family import Family
from vit2linear.strict import shown


def model_types() -> dict[str, type[Family]]:
    """Every supported ``model_type``, plain ViTs first."""
    found: dict[str, type[Family]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    families = Family.__subclasses__()
    while families:
        family = families.pop(0)
        found |= dict.fromkeys(vars(family).get("model_types", {}), family)
        families = family.__subclasses__() + families
    return found


def family_of(name: str, config: dict[str, Any]) -> Family:
    """How the source called ``name``, with this ``config.json``, is read.

    Raises:
        UnsupportedModelError: no family knows its model type, or its family cannot read this variant.
    """
    known, model_type = model_types(), config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UnsupportedModelError(
            f"{name!r} is a {shown(model_type)} model in the transformers layout.",
            f"Supported model types: {', '.join(known)}; any timm checkpoint works as well.",
        )
    return known[model_type](name, config)
