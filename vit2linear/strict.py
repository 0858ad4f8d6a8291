"""Plain tables to frozen dataclasses, strictly: unknown keys and wrong types are errors, all reported together."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

from vit2linear.errors import RecipeError

T = TypeVar("T")

DEEPEST = 64
"""Levels of tables and lists; beyond, nobody wrote it by hand, and functions that call themselves run out of stack."""

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 80


def shown(value: Any) -> str:
    """A value for a message, shortened."""
    return _brief.repr(value)


def malformed(value: Any) -> str | None:
    """What a parsed file holds that none should: endless nesting, or text that is not Unicode; ``None``: neither."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > DEEPEST:
            return f"more than {DEEPEST} levels of nesting"
        if isinstance(item, str) and not _is_unicode(item):
            return f"text that is not Unicode: {shown(item)}"
        if isinstance(item, dict):
            todo += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            todo += [(part, depth + 1) for part in item]
    return None


def _is_unicode(text: str) -> bool:
    """Half of a surrogate pair, which JSON can spell, cannot be printed."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def build(kind: type[T], table: dict[str, Any], default: T, where: str) -> T:
    """The dataclass ``kind`` from a plain table; missing fields come from ``default``.

    Raises:
        RecipeError: every unknown key and wrong type at once.
    """
    problems: list[str] = []
    built = _build(kind, table, default, "", problems)
    raise_all(problems, where)
    assert isinstance(built, kind)
    return built


def raise_all(problems: list[str], where: str) -> None:
    """Raise one ``RecipeError`` with every problem, if there are any."""
    if problems:
        raise RecipeError(f"{where}: " + "; ".join(problems) + ".")


def _build(kind: Any, value: Any, default: Any, where: str, problems: list[str]) -> Any:
    """``value`` as ``kind``; missing fields come from ``default``; what is wrong is appended to ``problems``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    before = len(problems)
    if dataclasses.is_dataclass(kind):
        if type(value) is kind:
            return value
        if isinstance(value, dict):
            return _build_dataclass(kind, value, default, where, problems)
    elif origin in (types.UnionType, typing.Union):
        arms = [a for a in args if a is not type(None)]
        for arm in arms:
            found: list[str] = []
            built = _build(arm, value, default, where, found)
            if not found:
                return built
        problems += found
        return default
    elif origin is Literal:
        if value in args:
            return value
        problems.append(f"{where}: {shown(value)} is not one of {', '.join(map(repr, args))}")
        return default
    elif origin is tuple:
        if isinstance(value, list | tuple):
            empty: Any = args[0]() if isinstance(args[0], type) and dataclasses.is_dataclass(args[0]) else None
            items = tuple(_build(args[0], v, empty, f"{where}.{i}", problems) for i, v in enumerate(value))
            return items if len(problems) == before else default
    elif origin is dict:
        if isinstance(value, dict):
            table = {k: _build(args[1], v, None, f"{where}.{k}", problems) for k, v in value.items()}
            return table if len(problems) == before else default
    elif kind is Any:
        return value
    elif isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        problems.append(f"{where}: an integer beyond 64 bits")
        return default
    elif kind is float and isinstance(value, float) and not math.isfinite(value):
        problems.append(f"{where}: {value} is not a finite number")
        return default
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    names = {int: "an integer", float: "a number", str: "a string", dict: "a table", tuple: "an array"}
    wanted = names.get(origin or kind, "a table")
    problems.append(f"{where}: {shown(value)} is not {wanted}")
    return default


def _build_dataclass(kind: Any, value: dict[str, Any], default: Any, where: str, problems: list[str]) -> Any:
    hints = typing.get_type_hints(kind)
    fields = [f.name for f in dataclasses.fields(kind)]
    built = {}
    for key, item in value.items():
        path = f"{where}.{key}".lstrip(".")
        if key in fields:
            built[key] = _build(hints[key], item, getattr(default, key), path, problems)
            continue
        close = get_close_matches(key, fields, n=1)
        guess = f"did you mean {close[0]!r}?" if close else f"allowed here: {', '.join(fields) or 'nothing'}"
        problems.append(f"{path if len(path) < 80 else path[:80] + '...'}: unknown key; {guess}")
    return dataclasses.replace(default, **built)
