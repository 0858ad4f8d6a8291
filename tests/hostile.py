"""Mutations of honest files, for tests of what strangers' files may do to us: nothing."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from vit2linear.errors import Vit2LinearError

T = TypeVar("T")
SECONDS = 10
"""Of the processor: no example takes longer."""

NUMBERS = (0, -1, 1, 3, 7, 4096, 10**5, 10**6, 2**31, 10**9, -(10**9), 2**63, 10**30, 10**400)
TEXTS = ("", "x", "\ud800", "\0", "../../etc/passwd", "/dev/zero", "é" * 300, "a" * 5_000, "NaN", "[0]", "gelu", "demo")
junk = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.floats()
    | st.sampled_from(TEXTS)
    | st.text(max_size=8)
    | st.integers(-8, 64),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def repeatable(examples: int) -> settings:
    """The same examples in every run, and as many as are said."""
    return settings(
        max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )


def outcome(act: Callable[[], T], untouched: Path) -> T | Vit2LinearError:
    """What ``act`` returns or, in our own words, why not: soon, and without a trace in the folder ``untouched``."""
    before, start = listing(untouched), time.process_time()
    try:
        found: T | Vit2LinearError = act()
    except Vit2LinearError as error:
        found = error
        assert 20 < len(str(error).encode()) < 4_000
    assert time.process_time() - start < SECONDS
    assert listing(untouched) == before
    return found


def listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every file below, with its size and time."""
    found = [(str(path.relative_to(folder)), path.lstat()) for path in folder.rglob("*")]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


@st.composite
def mutated(draw: st.DrawFn, base: Any) -> Any:
    """A copy of JSON-like data with one to three things changed."""
    value = copy.deepcopy(base)
    for _ in range(draw(st.sampled_from((1, 1, 2, 3)))):
        places = list(_places(value))
        if not places:
            break
        holder, key = draw(st.sampled_from(places))
        old = holder[key]
        kind = draw(st.sampled_from(("junk", "junk", "number", "drop", "wrap", "rename", "nest")))
        if kind == "drop" or (kind == "rename" and isinstance(holder, list)):
            del holder[key]
        elif kind == "rename":
            holder[draw(st.sampled_from(TEXTS[:4]) | st.text(max_size=8))] = holder.pop(key)
        elif kind == "number":
            holder[key] = draw(st.sampled_from(NUMBERS))
        elif kind == "wrap":
            holder[key] = draw(st.sampled_from(([old], [old] * 3, {"a": old}, str(old))))
        elif kind == "nest":
            for _ in range(draw(st.sampled_from((3, 70, 150)))):
                old = [old]
            holder[key] = old
        else:
            holder[key] = draw(junk)
    return value


@st.composite
def mangled(draw: st.DrawFn, text: bytes) -> bytes:
    """Bytes of a file that broke."""
    kind = draw(st.sampled_from(("cut", "flip", "insert", "empty", "mark", "deep", "binary", "latin")))
    at = draw(st.integers(0, max(len(text) - 1, 0)))
    some = draw(st.binary(min_size=1, max_size=8))
    broken = {
        "cut": text[:at],
        "flip": text[:at] + some[:1] + text[at + 1 :],
        "insert": text[:at] + some + text[at:],
        "empty": b"",
        "mark": b"\xef\xbb\xbf" + text,
        "deep": text[:at] + b"[" * 3_000 + text[at:],
        "binary": draw(st.binary(max_size=64)),
        "latin": text[:at] + b"\xe9" + text[at:],
    }
    return broken[kind]


def files(base: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A JSON file, changed in what it says or, less often, in how it is written."""
    text = json.dumps(base).encode()
    changed = mutated(base).map(lambda value: json.dumps(value).encode())
    return st.one_of(changed, changed, changed, mangled(text))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) in nested dicts and lists."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "owned")


def without_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a source holds, whose file is gone."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return weights
