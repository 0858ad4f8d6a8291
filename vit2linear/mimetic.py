"""Mimetic initialisation of attention (Trockman and Kolter, arXiv 2305.09828): random weights that look pretrained.

In trained ViTs the product of query and key weights has a positive diagonal and that of value and output weights a
negative one. So both products are drawn with such a diagonal and factored by a singular value decomposition.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from timm.layers import build_sincos2d_pos_embed
from torch import Tensor, nn

from vit2linear.errors import SurgeryError
from vit2linear.plan import Plan, kind_at

QUERY_KEY, VALUE_OUTPUT = 0.7, 0.4
"""Weight of the noise and of the diagonal in either product, the paper's."""


def mimetic_weights(model: nn.Module, plan: Plan, seed: int) -> dict[str, Tensor]:
    """New values for the attention weights at every site of a timm model, and for learned position embeddings.

    For every head W_Q W_K^T is the best approximation of rank head_dim of 0.7 Z + 0.7 I, and for every site
    W_V W_proj = 0.4 Z - 0.4 I, where the entries of Z are normal with variance 1 / channels and every Z is drawn anew.
    Position embeddings that are a sequence under timm's name ``pos_embed`` become sines and cosines of rows and columns
    (class tokens and registers: 0).

    Args:
        model: any timm model with the sites of ``plan``.
        plan: sites that keep their softmax are initialised too.
        seed: the same one gives the same values.

    Returns:
        Keys of the state dict to values, float32.

    Raises:
        SurgeryError: see ``check_mimetic``.
    """
    check_mimetic(model, plan)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for site in (s.site for s in plan.sites):
        size = site.geometry
        heads = [_factors(size.width, QUERY_KEY, 1, generator) for _ in range(size.num_heads)]
        queries, keys = (torch.cat([head[side][:, : size.head_dim] for head in heads], 1) for side in (0, 1))
        values, output = _factors(size.width, VALUE_OUTPUT, -1, generator)
        # Linear layers hold their matrices transposed.
        weights[f"{site.path}.qkv.weight"] = torch.cat([queries.T, keys.T, values.T])
        weights[f"{site.path}.{kind_at(model, site).output}.weight"] = output
    return weights | _position_embeddings(model)


def check_mimetic(model: nn.Module, plan: Plan) -> None:
    """That every site has one projection ``qkv`` and an output projection, both of the tokens' width.

    Raises:
        SurgeryError: a site has others.
    """
    for site in (s.site for s in plan.sites):
        module, width = model.get_submodule(site.path), site.geometry.width
        layers = getattr(module, "qkv", None), getattr(module, kind_at(model, site).output, None)
        shapes = [tuple(m.weight.shape) if isinstance(m, nn.Linear) else None for m in layers]
        heads = site.geometry.num_heads * site.geometry.head_dim
        if heads != width or shapes != [(3 * width, width), (width, width)]:
            raise SurgeryError(
                f"{site.path}: init 'mimetic' needs one projection 'qkv' and an output projection, both {width} wide "
                f"like the tokens; sites of kind {site.kind!r} have others here.",
                "Use init 'full', 'mlp', 'attention' or 'random'.",
            )


def _factors(
    width: int, size: float, sign: int, generator: torch.Generator
) -> tuple[Float[Tensor, "channels rank"], Float[Tensor, "channels rank"]]:
    """L and R with L R^T = size (Z + sign I), singular values in falling order and split evenly."""
    noise = torch.randn(width, width, generator=generator) / math.sqrt(width)
    left, values, right = torch.linalg.svd(size * (noise + sign * torch.eye(width)))
    return left * values.sqrt(), right.T * values.sqrt()


def _position_embeddings(model: nn.Module) -> dict[str, Tensor]:
    """Sines and cosines for every learned ``pos_embed`` of shape (1, tokens, channels) beside a patch embedding."""
    found = {}
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        parent = model.get_submodule(path)
        grid = getattr(getattr(parent, "patch_embed", None), "grid_size", None)
        if last != "pos_embed" or grid is None or parameter.ndim != 3 or not parameter.requires_grad:
            continue
        prefix = parameter.shape[1] - math.prod(grid)
        if prefix in (0, getattr(parent, "num_prefix_tokens", 0)) and parameter.shape[2] % 4 == 0:
            patches = build_sincos2d_pos_embed(list(grid), dim=parameter.shape[2])
            found[name] = torch.cat([torch.zeros(prefix, parameter.shape[2]), patches])[None]
    return found
