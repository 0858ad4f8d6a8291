"""What a source is and what a conversion would do to it, without reading a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from vit2linear import licence, model
from vit2linear.errors import SurgeryError
from vit2linear.plan import NOT_SOFTMAX_ROUTING, make_plan, plan_notes
from vit2linear.probe import plan_to_json, probe
from vit2linear.recipe import ALL, Rule
from vit2linear.resolve import layout_of, resolve
from vit2linear.sizes import Size


@dataclass(frozen=True)
class Inspection:
    """A source and the plan of converting it with one operator."""

    source: str
    layout: str
    architecture: str
    """timm's name."""
    commit: str | None
    licence: dict[str, Any]
    parameters: int
    num_classes: int
    input_size: tuple[int, ...]
    """Channels, height and width in pixels."""
    op: str
    sites: list[dict[str, Any]]
    """Every site: path, kind, geometry, window, tokens, evaluation, what would be given up."""
    losses: dict[str, str]
    """What would be given up, name to words; accepted with ``--drop``."""
    left_alone: dict[str, str]
    """Classes of other attention modules in the model, and why they stay as they are."""
    refused: str | None
    """Why the operator cannot be used, where it cannot."""
    flops_before: int
    """Floating-point operations of one image."""
    flops: int | None
    """The same after conversion."""
    notes: list[str]


def inspect(
    source: str, op: str = "relu", *, revision: str | None = None, arch: str | None = None, size: Size | None = None
) -> Inspection:
    """Look at a source; only its configuration is read, from the Hub as well.

    Args:
        source, revision, arch: as in a recipe.
        op: the operator that would replace the softmax at every site.
        size: height and width of the input in pixels; default: the source's own.

    Raises:
        SourceError: the source is not there, or not supported.
        SurgeryError: it has no softmax attention, with the reason.
    """
    ref = resolve(source, revision, arch)
    layout = layout_of(ref)
    spec = layout.spec(ref)
    if size is not None:
        spec = model.at_size(spec, size)
    stated = licence.of_source(ref, spec.pretrained_cfg)
    skeleton = model.skeleton(spec)
    kept = make_plan(skeleton, [Rule(op="softmax")])
    refused = None
    try:
        plan = make_plan(skeleton, [Rule(op=op, drop=(ALL,))])
        probed = probe(skeleton, plan)
    except SurgeryError as error:
        plan, refused = kept, str(error)
        probed = probe(skeleton, kept)
    pixels = model.input_size(skeleton)
    return Inspection(
        source=ref.name,
        layout=type(layout).__module__.rpartition(".")[2],
        architecture=spec.architecture,
        commit=ref.repo.commit if ref.repo is not None else None,
        licence=stated.fields,
        parameters=sum(p.numel() for p in skeleton.parameters()),
        num_classes=int(skeleton.num_classes),  # type: ignore[arg-type]
        input_size=pixels,
        op=op,
        sites=plan_to_json(plan, probed),
        losses={name: words for name, (words, _) in plan.losses.items()},
        left_alone=_left_alone(skeleton),
        refused=refused,
        flops_before=probed.flops_before,
        flops=None if refused else probed.flops,
        notes=[*spec.notes, *plan_notes(plan), *stated.notes],
    )


def _left_alone(skeleton: nn.Module) -> dict[str, str]:
    names = {type(m).__name__ for m in skeleton.modules()}
    return {name: reason for name, reason in NOT_SOFTMAX_ROUTING.items() if name in names}
