"""What may be said about a model, checked before anything is built from it: kinds of values, sizes, names.

Descriptions come from strangers. Whatever they say, the answer is a model on the meta device or one clear error, in
seconds: no path that they name is opened, and no number that they state is taken as a length unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vit2linear.errors import UnsupportedModelError, Vit2LinearError
from vit2linear.strict import shown

LARGEST = 1_000_000
"""No width, depth or number of classes is larger."""
LARGEST_SIDE = 16_384
"""Pixels."""

_NOT_THE_MODELS = {
    "base",
    "cache_dir",
    "checkpoint_path",
    "device",
    "dtype",
    "exportable",
    "features_only",
    "no_jit",
    "operators",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_model_args",
    "pretrained_strict",
    "pruned",
    "scriptable",
}
"""Arguments of timm's factory that say where a model is from and how it is run, not what it is."""

_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming", "random")
_CROP_MODES = ("center", "squash", "border")


@contextmanager
def understanding(what: str) -> Iterator[None]:
    """Errors of code that reads ``what`` mean that it says what no model has."""
    try:
        yield
    except Vit2LinearError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise UnsupportedModelError(
            f"{what} cannot be understood: {first_line(error)}.", "Mend it, or download it again."
        ) from error


def first_line(error: Exception) -> str:
    """An error in a line."""
    said = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__


def check_kinds(what: str, stated: Mapping[str, Any], examples: Mapping[str, Any]) -> None:
    """Refuse values of another kind than the example of the same name; a tuple holds several examples.

    Raises:
        UnsupportedModelError: names each in the file ``what``.
    """
    problems = [
        f"{key} is {shown(stated[key])}, not {_kind(example)}"
        for key, example in examples.items()
        if stated.get(key) is not None and not _fits(stated[key], example)
    ]
    _raise(what, problems)


def check_description(name: str, model_args: Mapping[str, Any], cfg: Mapping[str, Any]) -> None:
    """Refuse arguments and a timm ``pretrained_cfg`` that no model can have; what timm refuses itself is left to it.

    Raises:
        UnsupportedModelError: names each.
    """
    problems = [f"model_args.{key} is no property of a model" for key in sorted(_NOT_THE_MODELS & model_args.keys())]
    problems += [f"model_args.{where} is {shown(n)}, beyond {LARGEST:,}" for where, n in _beyond("", model_args)]
    if (size := model_args.get("img_size")) is not None and not _is_size(size if isinstance(size, list) else [size]):
        problems.append(f"img_size is {shown(size)}, not {_PIXELS}")
    problems += [
        f"{key} is {shown(cfg[key])}, not {words}"
        for key, (words, allowed) in _CFG.items()
        if cfg.get(key) is not None and not allowed(cfg[key])
    ]
    _raise(f"the description of {name!r}", problems)


def _raise(what: str, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UnsupportedModelError(
            f"{what} says what no model has: {'; '.join(problems[:5])}{more}.", "Mend it, or download it again."
        )


def _fits(value: Any, example: Any) -> bool:
    if isinstance(example, tuple):
        return any(_fits(value, e) for e in example)
    if isinstance(example, list):
        return isinstance(value, list | tuple) and all(_fits(v, example[0]) for v in value)
    if isinstance(example, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(example, bool)
    if isinstance(example, int):
        return isinstance(value, int) and 0 <= value <= LARGEST
    if isinstance(example, float):
        return isinstance(value, int | float) and abs(value) <= LARGEST  # which NaN is not
    return isinstance(value, type(example))


def _kind(example: Any) -> str:
    if isinstance(example, tuple):
        return " or ".join(_kind(e) for e in example)
    if isinstance(example, list):
        return f"a list, each {_kind(example[0])}"
    names = {
        bool: "true or false",
        int: f"a whole number between 0 and {LARGEST:,}",
        float: f"a number up to {LARGEST:,}",
        str: "text",
    }
    return names.get(type(example), "an object")


def _beyond(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Numbers that are not finite, or larger than any of a model."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _beyond(f"{where}.{shown(key)[1:-1]}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _beyond(f"{where}.{i}", item)
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        yield where, value


def _is_size(sides: Any) -> bool:
    return _fits(sides, [1]) and all(1 <= side <= LARGEST_SIDE for side in sides)


def _is_input(size: Any) -> bool:
    return _fits(size, [1]) and len(size) == 3 and size[0] > 0 and _is_size(size[1:])


def _is_text(value: Any) -> bool:
    return _fits(value, "")


_PIXELS = f"pixels between 1 and {LARGEST_SIDE:,}"
_NAMES = ("text, or a list of text", lambda v: _fits(v, ("", [""])))
_CFG: dict[str, tuple[str, Any]] = {
    "input_size": (f"channels, then {_PIXELS}", _is_input),
    "num_classes": (_kind(1), lambda v: _fits(v, 1)),
    "mean": ("numbers", lambda v: _fits(v, [0.5]) and len(v) > 0),
    "std": ("numbers above 0", lambda v: _fits(v, [0.5]) and len(v) > 0 and min(v) > 0),
    "interpolation": (f"one of {', '.join(_INTERPOLATIONS)}", lambda v: v in _INTERPOLATIONS),
    "crop_pct": ("a number between 0.05 and 20", lambda v: _fits(v, 0.5) and 0.05 <= v <= 20),
    "crop_mode": (f"one of {', '.join(_CROP_MODES)}", lambda v: v in _CROP_MODES),
    "label_names": ("a list, each text", lambda v: _fits(v, [""])),
    "license": ("text", _is_text),
    "tag": ("text", _is_text),
    "classifier": _NAMES,
    "first_conv": _NAMES,
}
"""What we or timm read of ``pretrained_cfg``, in words, and whether a value is such."""
