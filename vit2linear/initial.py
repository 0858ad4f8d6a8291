"""What of the source's weights the student starts from: ``source.init`` and ``source.head``.

The modes are the rows of the table of arXiv 2609.35745. The teacher is the whole source in all of them, and the
operators' own weights are always the operators' matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from timm.layers import ConvMlp, GatedMlp, GlobalResponseNormMlp, GluMlp, Mlp, SwiGLU
from timm.models.gemma4_vit import Gemma4GatedMlp
from timm.models.pvt_v2 import MlpWithDepthwiseConv
from torch import Tensor, nn

from vit2linear.errors import SurgeryError
from vit2linear.mimetic import check_mimetic, mimetic_weights
from vit2linear.model import fresh
from vit2linear.plan import Plan, kind_at
from vit2linear.recipe import SourceOptions
from vit2linear.sources.base import ModelSpec

MLPS = (Mlp, GluMlp, SwiGLU, GatedMlp, ConvMlp, GlobalResponseNormMlp, MlpWithDepthwiseConv, Gemma4GatedMlp)
"""timm's classes of MLPs in the blocks of models that have sites."""


def copied_keys(source: nn.Module, plan: Plan, options: SourceOptions) -> frozenset[str]:
    """Keys of the source's state dict that the student starts from; the others are drawn anew.

    Args:
        source: the source, on any device, meta included.
        plan: its sites; those that keep their softmax count as attention too.
        options: ``init`` and ``head``.

    Raises:
        SurgeryError: ``init`` does not suit a site of this model.
    """
    keys = frozenset(source.state_dict())
    if options.init == "full":
        copied = keys
    elif options.init == "mlp":
        _check_apart(source, plan, options.init)
        copied = _inside(keys, _mlps(source, plan))
    elif options.init == "attention":
        _check_apart(source, plan, options.init)
        outputs = [f"{s.site.path}.{kind_at(source, s.site).output}" for s in plan.sites]
        copied = _inside(keys, (s.site.path for s in plan.sites)) - _inside(keys, outputs)
    else:
        if options.init == "mimetic":
            check_mimetic(source, plan)
        copied = frozenset()
    head = _inside(keys, _heads(source))
    return copied | head if options.head == "copy" else copied - head


def drawn_weights(
    source: nn.Module, spec: ModelSpec, plan: Plan, options: SourceOptions, seed: int
) -> dict[str, Tensor]:
    """The weights that the student does not take from the source, as timm initialises this architecture.

    Args:
        source: the source, which is not changed.
        spec: how timm builds it.
        plan: its sites.
        options: ``init`` and ``head``.
        seed: the same one gives the same weights; the global random state is left alone.

    Returns:
        Keys of the source's state dict to values on the CPU: all but ``copied_keys``, so nothing for a full copy.

    Raises:
        SurgeryError: ``init`` does not suit a site of this model.
    """
    drawn = source.state_dict().keys() - copied_keys(source, plan, options)
    if not drawn:
        return {}
    new = fresh(spec, seed)
    weights = new.state_dict()
    if options.init == "mimetic":
        weights |= mimetic_weights(new, plan, seed)
    return {key: weights[key] for key in sorted(drawn)}


def start_words(options: SourceOptions, headless: bool) -> str:
    """What is copied and what is drawn anew, to follow "with the attention replaced, ..."."""
    head = [] if headless else ["the class head"]
    if options.init == "full":
        return "everything else copied" + (f" but {head[0]}, drawn anew" if head and options.head == "random" else "")
    parts = {"mlp": ["the MLPs"], "attention": ["the query, key and value projections"]}.get(options.init, [])
    parts += head if options.head == "copy" else []
    copied = f"only {' and '.join(parts)} copied" if parts else "nothing copied"
    how = ", with mimetic attention (arXiv 2305.09828)" if options.init == "mimetic" else ""
    return f"{copied}, the rest drawn anew{how}"


def _check_apart(source: nn.Module, plan: Plan, init: str) -> None:
    """That attention and MLP have weights of their own."""
    for site in (s.site for s in plan.sites):
        if kind_at(source, site).whole_block:
            raise SurgeryError(
                f"{site.path}: init {init!r} copies attention or MLPs alone, but sites of kind {site.kind!r} are whole "
                "blocks with one input projection for both.",
                "Use init 'full' or 'random'.",
            )


def _mlps(source: nn.Module, plan: Plan) -> list[str]:
    """Paths of the MLPs of blocks, which are numbered: neither those of a pooling or a head nor those inside sites."""
    found = [
        path
        for path, module in source.named_modules()
        if isinstance(module, MLPS) and any(part.isdigit() for part in path.split("."))
    ]
    return [path for path in found if not any(path.startswith(f"{s.site.path}.") for s in plan.sites)]


def _heads(source: nn.Module) -> list[str]:
    """Paths of what timm calls the classifier: one module, several, or none."""
    found = source.get_classifier() if hasattr(source, "get_classifier") else ()  # type: ignore[operator]
    heads = found if isinstance(found, tuple) else (found,)
    return [path for path, module in source.named_modules() if any(module is head for head in heads)]


def _inside(keys: Iterable[str], paths: Iterable[str]) -> frozenset[str]:
    """The keys of the modules at ``paths``."""
    prefixes = tuple(f"{path}." for path in paths)
    return frozenset(key for key in keys if key.startswith(prefixes))
