"""What the files of an artifact say, checked before a model is built from them: artifacts too come from strangers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import timm
import timm.models
from safetensors import safe_open
from torch import nn

from vit2linear.errors import ArtifactError
from vit2linear.jsonfile import read_object
from vit2linear.outline import outline
from vit2linear.sources._description import check_description, first_line
from vit2linear.strict import shown

FORMAT = 1
"""Of the report. What a later version writes is left to it."""

_ABSENT = object()
_MEND = "Convert again, or download the artifact again."


def read_config(path: Path, name: str) -> dict[str, Any]:
    """``config.json`` of the artifact ``name``, which has base architecture and operators.

    Raises:
        ArtifactError: it is not.
    """
    config = read_object(path, f"{path.name} of {name!r}", ArtifactError)
    args = config.get("model_args")
    if (
        not isinstance(args, dict)
        or not isinstance(args.get("base"), str)
        or not isinstance(config.get("pretrained_cfg"), dict)
    ):
        raise ArtifactError(f"{path.name} of {name!r} does not say of what base it is.", _MEND)
    operators = args.get("operators")
    if not isinstance(operators, dict) or not all(
        isinstance(e, dict) and isinstance(e.get("op"), str) for e in operators.values()
    ):
        raise ArtifactError(f"{path.name} of {name!r} does not say which operators are where.", _MEND)
    return config


def read_report(path: Path, name: str) -> dict[str, Any]:
    """``report.json`` of the artifact ``name``, with all that ``eval`` needs.

    Raises:
        ArtifactError: something is missing or of another kind, or a later version wrote it.
    """
    report = read_object(path, f"{path.name} of {name!r}", ArtifactError)
    if isinstance(report.get("format"), int) and report["format"] > FORMAT:
        raise ArtifactError(f"{name!r} was written by a later vit2linear.", "Upgrade vit2linear.")
    problems = [where for where, fits in _READ_BACK.items() if not fits(_at(report, where))]
    problems += [
        w for w, fits in _WHERE_PRESENT.items() if (value := _at(report, w)) is not _ABSENT and not fits(value)
    ]
    if _at(report, "source.repo") is not _ABSENT and _at(report, "source.commit") is _ABSENT:
        problems.append("source.commit")
    if problems:
        raise ArtifactError(f"{path.name} of {name!r} lacks, or has of another kind: {', '.join(problems)}.", _MEND)
    return report


def check_model(config: dict[str, Any], weights: Path, name: str) -> None:
    """Whether the weights are those of the model that ``config`` describes, before it takes any memory.

    Raises:
        ArtifactError: they are not, or there is no such model.
    """
    try:
        with safe_open(weights, "pt") as file:
            held = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except Exception as error:  # of a parser on a stranger's bytes
        raise ArtifactError(f"{weights.name} of {name!r} cannot be read: {first_line(error)}.", _MEND) from error
    model = outline(f"the model of {name!r}", _creator(config))
    said = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    wrong = [k for k in sorted(held.keys() | said.keys()) if held.get(k) != said.get(k)]
    if wrong:
        key = wrong[0]
        raise ArtifactError(
            f"{weights.name} of {name!r} does not fit its config.json at {len(wrong)} weights: {shown(key)} is "
            f"{held.get(key, 'missing')} there and {said.get(key, 'missing')} here.",
            _MEND,
        )


def _creator(config: dict[str, Any]) -> Callable[[], nn.Module]:
    def create() -> nn.Module:
        cfg, architecture, args = timm.models._hub._parse_model_cfg(dict(config), {})
        plain = {k: v for k, v in args.items() if k not in ("base", "operators")}
        check_description(architecture, plain, cfg)
        model: nn.Module = timm.create_model(architecture, pretrained_cfg=cfg, **args)
        return model

    return create


def _at(report: Any, where: str) -> Any:
    """The entry at a dotted path; ``_ABSENT`` if there is none."""
    for key in where.split("."):
        report = report.get(key, _ABSENT) if isinstance(report, dict) else _ABSENT
    return report


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _one_or_several(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """For sets that are mixed of several."""
    return lambda value: fits(value) or (isinstance(value, list) and bool(value) and all(map(fits, value)))


def _is_class_map(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(type(i) is int and i >= 0 for i in value.values()))


def _is_files(value: Any) -> bool:
    """Digests by name; the names lie beside the report."""
    if not isinstance(value, dict) or not all(map(_is_text, value.values())):
        return False
    return all(name == PurePosixPath(name).name and "\\" not in name for name in value)


_READ_BACK: dict[str, Callable[[Any], bool]] = {
    "source.name": _is_text,
    "data.path": _one_or_several(_is_text),
    "data.held_out": _one_or_several(_is_text_or_none),
}
"""Entries of the report that are read back, and whether a value is one."""
_WHERE_PRESENT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("source.repo", "source.commit", "source.arch", "source.weights_sha256"), _is_text),
    **dict.fromkeys(("data.split", "data.val_split"), _is_text_or_none),
    **dict.fromkeys(("data.ignore_labels", "data.streaming"), _is_switch),
    "data.seed": lambda value: type(value) is int and 0 <= value < 2**32,
    "data.class_map": _is_class_map,
    "files": _is_files,
}
"""Those that only some artifacts have."""
