"""Reading files of weights, without executing anything in them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict, load_state_dict
from torch import Tensor

from vit2linear.errors import WeightsError

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".pth.tar")
"""Files that may hold weights."""

_WRAPPERS = ("model", "state_dict", "module", "model_state", "encoder")
"""Names under which training checkpoints keep the weights; the last is I-JEPA's."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_BUFFERS = (torch.int64, torch.int32, torch.bool)
"""Types of indices and masks."""


def read(name: str, paths: Sequence[Path]) -> dict[str, Tensor]:
    """The weights in all ``paths``, as stored; what wraps them (``model.``, ``module.``, ``_orig_mod.``) is taken off.

    Raises:
        WeightsError: a file of the source called ``name`` is broken, or holds more than weights.
    """
    weights: dict[str, Tensor] = {}
    for path in paths:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "'torch.load' received a zip file")  # and the error says it again
                weights |= _unwrapped(load_state_dict(str(path), weights_only=True))
        except Exception as error:  # of a parser on a stranger's bytes: any kind is possible
            raise _unreadable(name, path, error) from error
    if not weights:
        raise WeightsError(f"the files of {name!r} hold no weights.")
    return weights


def _unwrapped(stored: Any) -> dict[str, Tensor]:
    """The weights inside a training checkpoint, without what is none."""
    inner = next((stored[key] for key in _WRAPPERS if isinstance(stored.get(key), dict)), None)
    if inner is not None:
        return _unwrapped(clean_state_dict(inner))
    return {key: value for key, value in stored.items() if isinstance(key, str) and isinstance(value, Tensor)}


def in_float32(name: str, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The weights in float32, and the type that most of them had.

    Raises:
        WeightsError: a type that numbers cannot be read from by themselves, such as float8 with scales elsewhere, or
            a tensor that is not simply its numbers.
    """
    sizes: dict[torch.dtype, int] = {}
    converted = {}
    for key, value in weights.items():
        converted[key] = value
        if value.layout != torch.strided or value.device.type != "cpu" or _repeats(value):
            raise WeightsError(f"{key!r} of {name!r} is no plain tensor.", "Save the weights as safetensors.")
        if value.dtype not in (*_FLOATS, *_BUFFERS):
            raise WeightsError(f"{key!r} of {name!r} is {value.dtype}.", "Quantised weights are not supported.")
        if value.is_floating_point():
            converted[key] = value.float()
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
    most = max(sizes, key=sizes.__getitem__, default=torch.float32)
    return converted, str(most).removeprefix("torch.")


def check_fit(name: str, weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Whether ``weights`` can be those of a model, before it takes memory.

    Args:
        name: the source, for messages.
        weights: as they were read.
        expected: the model's, on the meta device; names that timm changes while loading are in one of them only.

    Raises:
        WeightsError: the model has far more numbers than the files hold, or real ones where those are integers.
    """
    held, said = (sum(value.numel() for value in tensors.values()) for tensors in (weights, expected))
    if said > 4 * held + 100_000_000:  # positions and tables may grow with the image
        raise WeightsError(
            f"the weights of {name!r} do not fit its config: that describes {said:,} numbers, the files hold {held:,}."
        )
    wrong = [k for k, v in weights.items() if k in expected and v.is_floating_point() < expected[k].is_floating_point()]
    if wrong:
        raise WeightsError(
            f"{wrong[0]!r} and {len(wrong) - 1} more of {name!r} are {weights[wrong[0]].dtype}, not real numbers.",
            "Quantised weights are not supported.",
        )


def check_finite(name: str, weights: dict[str, Tensor]) -> None:
    """Whether all weights are numbers: otherwise all that is trained or measured would be none.

    Raises:
        WeightsError: says how many are not, and names the first.
    """
    wrong = [key for key, value in weights.items() if not value.isfinite().all()]
    if wrong:
        raise WeightsError(
            f"{len(wrong)} weights of {name!r} hold values that are not finite in float32: {', '.join(wrong[:3])}.",
            "Such a model gives no outputs; look for a better copy of it.",
        )


def _repeats(value: Tensor) -> bool:
    """A view of less memory than its shape says, which a pickle of a few bytes can blow up without limit."""
    return value.numel() * value.element_size() > value.untyped_storage().nbytes()


def _unreadable(name: str, path: Path, error: Exception) -> WeightsError:
    message = str(error.__cause__ or error)  # timm's words for torch's refusals are the same for all of them
    if "TorchScript" in message:
        return WeightsError(
            f"{path.name} of {name!r} is a TorchScript archive, which holds a program.",
            "Where you trust it, save torch.jit.load(FILE).state_dict() as safetensors.",
        )
    if re.search(r"Unsupported (global|class)", message):
        try:
            found = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
        except Exception:  # the format of long ago, which that function does not read
            found = []
        objects = f" ({', '.join(found)})" if found else ""
        return WeightsError(
            f"{path.name} of {name!r} holds Python objects besides weights{objects}; they could run code and are not "
            "loaded.",
            "Where you trust it, save its state dict as safetensors.",
        )
    reason = message.rpartition("WeightsUnpickler error:")[2].strip()  # what torch says before is advice to run it
    said = (reason.splitlines() or ["empty"])[0].rstrip(".") or type(error).__name__
    return WeightsError(
        f"{path.name} of {name!r} cannot be read: {said[:300]}.",
        f"Download it again; files of these kinds hold weights: {', '.join(SUFFIXES)}.",
    )
