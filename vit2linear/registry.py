"""Names of pluggable parts: a file's name in its folder is the part's name.

Adding an operator, a site kind, a layout or a loss is adding a file; there is no list to edit. Listing names imports
nothing, so that a misspelt name is found before torch is loaded.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from importlib import metadata
from pathlib import Path
from typing import Generic, TypeVar

from vit2linear.errors import RecipeError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """The parts in one folder of the package.

    Each module in the folder defines exactly one concrete subclass of the folder's base class. ``base.py`` and modules
    that start with an underscore are not parts.
    """

    def __init__(self, kind: str, package: str, base: str, entry_points: str | None = None) -> None:
        """Describe a folder of parts.

        Args:
            kind: the word for messages.
            package: the folder.
            base: ``module:Class`` of the base class, imported when needed.
            entry_points: group in which other packages announce parts of theirs; parts may then also be named
                ``module:Class``.
        """
        self.kind = kind
        self.package = package
        self._base = base
        self._entry_points = entry_points

    def names(self) -> list[str]:
        """Every name of the package and of entry points, sorted, without importing the parts."""
        folder = Path(__file__).parent.joinpath(*self.package.split(".")[1:])
        modules = (m.name for m in pkgutil.iter_modules([str(folder)]))
        own = [name for name in modules if name != "base" and not name.startswith("_")]
        return sorted({*own, *self._announced()})

    def check(self, name: str) -> None:
        """Raise ``UnknownNameError`` (with close matches) unless ``name`` is registered or is ``module:Class``."""
        if name not in self.names() and not (self._entry_points and ":" in name):
            raise UnknownNameError(self.kind, name, self.names())

    def get(self, name: str) -> type[T]:
        """The class called ``name``. An error inside its module is let through.

        Raises:
            UnknownNameError: no such name.
            RecipeError: what ``module:Class`` leads to is not a part of this kind.
        """
        self.check(name)
        base_module, base_name = self._base.split(":")
        base: type[T] = getattr(importlib.import_module(base_module), base_name)
        announced = self._announced()
        if ":" in name or name in announced:
            return self._external(announced.get(name, name), base)
        module = importlib.import_module(f"{self.package}.{name}")
        (found,) = (
            c
            for _, c in inspect.getmembers(module, inspect.isclass)
            if issubclass(c, base) and c.__module__ == module.__name__
        )
        return found

    def all(self) -> dict[str, type[T]]:
        """Name to class for every part."""
        return {name: self.get(name) for name in self.names()}

    def _announced(self) -> dict[str, str]:
        """Name to ``module:Class`` of the entry points."""
        return _entry_points(self._entry_points) if self._entry_points else {}

    def _external(self, value: str, base: type[T]) -> type[T]:
        module_name, _, class_name = value.partition(":")
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
            raise RecipeError(f"{self.kind} {value!r} cannot be found: {error}.", "Give module:Class.") from error
        if not (inspect.isclass(found) and issubclass(found, base)) or inspect.isabstract(found):
            raise RecipeError(f"{value!r} is not a complete {base.__module__}.{base.__name__}.")
        return found


@functools.cache
def _entry_points(group: str) -> dict[str, str]:
    """What is installed, read once: it takes tens of milliseconds, and operators are looked up for every site."""
    return {e.name: e.value for e in metadata.entry_points(group=group)}
