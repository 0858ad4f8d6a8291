"""Names of pluggable parts: a file's name in its folder is the part's name.

Adding an operator, a site kind, a layout or a loss is adding a file; there is no list to edit. Listing names imports
nothing, so that a misspelt name is found before torch is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Generic, TypeVar

from vit2linear.errors import UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """The parts in one folder of the package.

    Each module in the folder defines exactly one concrete subclass of the folder's base class. ``base.py`` and modules
    that start with an underscore are not parts.
    """

    def __init__(self, kind: str, package: str, base: str) -> None:
        """``kind`` is the word for messages, ``base`` is ``module:Class`` of the base class (imported when needed)."""
        self.kind = kind
        self.package = package
        self._base = base

    def names(self) -> list[str]:
        """Every name, sorted, without importing the parts."""
        folder = Path(__file__).parent.joinpath(*self.package.split(".")[1:])
        modules = (m.name for m in pkgutil.iter_modules([str(folder)]))
        return sorted(name for name in modules if name != "base" and not name.startswith("_"))

    def check(self, name: str) -> None:
        """Raise ``UnknownNameError`` (with close matches) unless ``name`` is registered."""
        if name not in self.names():
            raise UnknownNameError(self.kind, name, self.names())

    def get(self, name: str) -> type[T]:
        """The class called ``name``. An error inside its module is let through."""
        self.check(name)
        module = importlib.import_module(f"{self.package}.{name}")
        base_module, base_name = self._base.split(":")
        base: type[T] = getattr(importlib.import_module(base_module), base_name)
        (found,) = (
            c
            for _, c in inspect.getmembers(module, inspect.isclass)
            if issubclass(c, base) and c.__module__ == module.__name__
        )
        return found

    def all(self) -> dict[str, type[T]]:
        """Name to class for every part."""
        return {name: self.get(name) for name in self.names()}
