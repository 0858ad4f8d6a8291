"""What a plan means at the model's own size, without weights: one forward on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit2linear.context import AttentionContext
from vit2linear.errors import UnsupportedModelError, Vit2LinearError
from vit2linear.operator import Operator
from vit2linear.plan import Plan
from vit2linear.site import sites_of
from vit2linear.sources._description import first_line
from vit2linear.surgery import apply_plan


@dataclass(frozen=True)
class SiteProbe:
    """How one site is evaluated."""

    queries: int
    """Tokens that ask, in one image or window."""
    keys: int
    """Tokens that answer: fewer where keys are pooled."""
    grid: tuple[int, int] | None
    """Rows and columns of patches, where they lie on a grid."""
    evaluation: str
    """Evaluation order, and landmarks where there are any."""


@dataclass(frozen=True)
class Probe:
    """One forward of a plan."""

    sites: dict[str, SiteProbe]
    """Path to evaluation, for every replaced site."""
    flops: int
    """Floating-point operations of one image, a fused attention like its two matrix products."""
    flops_before: int
    """The same of the source."""


def probe(skeleton: nn.Module, plan: Plan) -> Probe:
    """Run the plan on a model on the meta device; the model is not changed.

    Raises:
        UnsupportedModelError: the source itself does not take an image of the size that its config says.
        SurgeryError: an operator cannot do what a site asks of it, a grid that is not there for example.
    """
    try:
        before = count_flops(apply_plan(skeleton, plan.with_operator("softmax")).eval())
    except Vit2LinearError:
        raise
    except Exception as error:  # from inside a model that a config describes: any kind is possible
        raise UnsupportedModelError(
            f"the {type(skeleton).__name__} that the config describes does not take its own images: "
            f"{first_line(error)}.",
            "Check the sizes in config.json.",
        ) from error
    student = apply_plan(skeleton, plan).eval()
    found: dict[str, SiteProbe] = {}
    for path, site in sites_of(student).items():
        site.op.register_forward_pre_hook(_recorder(found, path))
    flops = count_flops(student)
    return Probe(found, flops, before)


def plan_to_json(plan: Plan, probed: Probe) -> list[dict[str, Any]]:
    """One JSON object for each site: what was planned and how it runs."""
    return [
        {**asdict(s), **(asdict(probed.sites[s.site.path]) if s.site.path in probed.sites else {})} for s in plan.sites
    ]


def count_flops(model: nn.Module) -> int:
    """Floating-point operations of one image at the model's own size; ``model`` lies on the meta device."""
    # With gradients: the counter stumbles over views of parameters that were made without (class tokens, expanded).
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        model(example_pixels(model))
    return int(counter.get_total_flops())


def example_pixels(model: nn.Module) -> Float[Tensor, "1 channels height width"]:
    """One black image as a timm model takes it, where and in the type that it is."""
    parameter = next(model.parameters())
    cfg: dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    size = getattr(model, "_traits", {}).get("img_size") or cfg["input_size"][-2:]
    height, width = (size, size) if isinstance(size, int) else size
    channels = int(getattr(model, "in_chans", cfg["input_size"][0]))
    return torch.zeros(1, channels, height, width, device=parameter.device, dtype=parameter.dtype)


def _recorder(found: dict[str, SiteProbe], path: str) -> Any:
    def hook(op: Operator, args: tuple[Tensor, Tensor, Tensor, AttentionContext]) -> None:
        q, k, v, ctx = args
        found[path] = SiteProbe(q.shape[-2], k.shape[-2], ctx.grid, op.evaluation(q, k, v, ctx))

    return hook
