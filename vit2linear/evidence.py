"""What a person would look at: single images under both models, and where their tokens go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.distill.forward import has_head, last_features, pooled_feature
from vit2linear.routing import Maps, SiteRouting, compare_routing, routing_maps
from vit2linear.site import sites_of

SHOWN = 4
"""Images in a picture."""
SITES = 3
"""Sites in a picture: the first, the last, and those evenly between."""
MOST_TOKENS = 2500
"""Of one map; its memory grows with their square."""

Picture = UInt8[np.ndarray, "height width 3"]


@dataclass(frozen=True)
class Example:
    """One image under both models."""

    picture: Picture
    cosine: float
    """Between the pooled features."""
    teacher: str | None
    """First class and its probability; ``None`` without a head."""
    student: str | None


@dataclass(frozen=True)
class Looks:
    """Where one model looks on one image, as heat over the patch grid: by column title."""

    picture: Picture
    teacher: dict[str, np.ndarray]
    student: dict[str, np.ndarray]


@dataclass(frozen=True)
class Evidence:
    """All of it."""

    worst: tuple[Example, ...]
    best: tuple[Example, ...]
    routing: dict[str, SiteRouting]
    looks: tuple[Looks, ...]


@torch.no_grad()
def gather(
    teacher: nn.Module,
    student: nn.Module,
    pixels: Float[Tensor, "images channels height width"],
    data_config: Mapping[str, Any],
    labels: Sequence[str] | None,
) -> Evidence:
    """Look at some images.

    Args:
        teacher, student: converted with ``softmax`` and with the operators, in eval mode, on one device.
        pixels: images as they are evaluated.
        data_config: timm's, with the mean and the deviation that the pixels were normalised by.
        labels: the model's class names.
    """
    pictures = _pictures(pixels, data_config)
    device = next(student.parameters()).device
    (a, says), (b, answers) = (_answers(model, pixels.to(device), labels) for model in (teacher, student))
    cosine = F.cosine_similarity(a, b).tolist()
    order = sorted(range(len(pictures)), key=lambda i: cosine[i])
    examples = [Example(pictures[i], cosine[i], says[i], answers[i]) for i in order]
    half = min(SHOWN, len(examples) // 2)
    few = pixels[: min(SHOWN, len(pixels))].to(device)
    routing: dict[str, SiteRouting] = {}
    looks: tuple[Looks, ...] = ()
    if _tokens(student, few) <= MOST_TOKENS:
        theirs, mine = routing_maps(teacher, few), routing_maps(student, few)
        routing = compare_routing(theirs, mine, student)
        looks = _looks(_heats(teacher, theirs), _heats(student, mine), pictures)
    return Evidence(tuple(examples[:half]), tuple(examples[::-1][:half]), routing, looks)


def _answers(
    model: nn.Module, pixels: Tensor, labels: Sequence[str] | None
) -> tuple[Float[Tensor, "images channels"], list[str | None]]:
    features = last_features(model, pixels)
    pooled = pooled_feature(model, features).float().cpu()
    if not has_head(model) or not model.num_classes:
        return pooled, [None] * len(pixels)
    shares, classes = model.forward_head(features).float().softmax(-1).max(-1)  # type: ignore[operator]
    names = [labels[i].split(",")[0] if labels else f"class {i}" for i in classes.tolist()]
    return pooled, [f"{name} {share:.0%}" for name, share in zip(names, shares.tolist(), strict=True)]


def _pictures(pixels: Tensor, data_config: Mapping[str, Any]) -> list[Picture]:
    """Pixels as they were before they were normalised."""
    mean, std = (torch.tensor(data_config[k])[None, :, None, None] for k in ("mean", "std"))
    shown = (pixels.float().cpu() * std + mean).clamp(0, 1).expand(-1, 3, -1, -1)
    return [*(255 * shown).round().byte().permute(0, 2, 3, 1).numpy()]


def _tokens(model: nn.Module, pixels: Tensor) -> int:
    found = [0]
    hooks = [
        site.op.register_forward_hook(lambda _, args, __: found.append(max(args[0].shape[2], args[1].shape[2])))
        for site in sites_of(model).values()
    ]
    last_features(model, pixels[:1])
    for hook in hooks:
        hook.remove()
    return max(found)


def _looks(
    teacher: dict[str, np.ndarray], student: dict[str, np.ndarray], pictures: Sequence[Picture]
) -> tuple[Looks, ...]:
    """What the class token, or a patch on average, looks at, for plain models whose maps cover the image."""
    shared = [title for title in teacher if title in student]
    if not shared:
        return ()
    heats = (zip(*(heat[title] for title in shared), strict=True) for heat in (teacher, student))
    named = ([dict(zip(shared, row, strict=True)) for row in heat] for heat in heats)
    return tuple(Looks(*row) for row in zip(pictures, *named, strict=False))


def _heats(model: nn.Module, maps: Maps) -> dict[str, np.ndarray]:
    sites, prefix = sites_of(model), int(getattr(model, "num_prefix_tokens", 0))
    whole = {}
    for path, found in maps.items():
        grid = sites[path].grid_ref.grid
        if grid is not None and found.shape[2] == found.shape[3] == prefix + grid[0] * grid[1]:
            whole[path] = (found.mean(1).clamp_min(0), grid)
    if not whole:
        return {}
    paths = [*whole]
    chosen = sorted({round(i * (len(paths) - 1) / max(1, SITES - 1)) for i in range(SITES)})
    heats = {paths[i]: _heat(*whole[paths[i]], prefix) for i in chosen}
    if len({m.shape for m, _ in whole.values()}) == 1:
        rolled, grid = _rollout([m for m, _ in whole.values()]), whole[paths[0]][1]
        heats["rollout"] = _heat(rolled, grid, prefix)
    return heats


def _heat(m: Float[Tensor, "images queries keys"], grid: tuple[int, int], prefix: int) -> np.ndarray:
    row = m[:, 0] if prefix else m.mean(1)
    heat: np.ndarray = row[:, prefix:].unflatten(1, grid).numpy()
    return heat


def _rollout(maps: Sequence[Tensor]) -> Tensor:
    """Abnar and Zuidema, arXiv 2005.00928, section 3: the product of the layers' maps, half of each the identity."""
    rolled = torch.eye(maps[0].shape[-1]).expand_as(maps[0])
    for m in maps:
        rows = m / m.sum(-1, keepdim=True).clamp_min(1e-12)
        rolled = (0.5 * rows + 0.5 * torch.eye(m.shape[-1])) @ rolled
    return rolled
