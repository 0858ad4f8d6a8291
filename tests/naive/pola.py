import torch
from torch import Tensor
from torch.nn import functional as F

from tests.naive import Case


def positions(case: Case) -> Tensor:
    """(heads, tokens, head_dim), zero for prefix tokens."""
    resized = F.interpolate(case.params["positions"][None], case.grid, mode="bilinear", align_corners=False)[0]
    heads, tokens, d = case.k.shape[1:]
    patches = resized.reshape(heads, d, tokens - case.prefix).permute(0, 2, 1)
    return torch.cat([torch.zeros(heads, case.prefix, d, dtype=patches.dtype), patches], dim=1)


def routing(case: Case) -> Tensor:
    scale = torch.log1p(torch.exp(case.params["gamma"]))
    power = 1 + 4 / (1 + torch.exp(-case.params["theta"]))
    q, k = case.q / scale, (case.k + positions(case)) / scale
    (q_plus, q_minus), (k_plus, k_minus) = ((x.clamp_min(0) ** power, (-x).clamp_min(0) ** power) for x in (q, k))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("bhid,bhjd->bhij", a, b)

    same = product(q_plus, k_plus) + product(q_minus, k_minus)
    opposite = product(q_minus, k_plus) + product(q_plus, k_minus)
    maps = [kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * kernel.shape[-1]) for kernel in (same, opposite)]
    return torch.stack(maps, dim=2).flatten(1, 2)


def finish(case: Case, heads: Tensor) -> Tensor:
    weight, bias = case.params["output_gate.weight"], case.params["output_gate.bias"]
    batch, h, tokens, d = heads.shape
    factor = torch.einsum("bnc,oc->bno", case.x, weight) + bias
    return heads * factor.reshape(batch, tokens, h, d).permute(0, 2, 1, 3)
