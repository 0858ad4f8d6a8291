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


def phi(case: Case, x: Tensor) -> Tensor:
    batch, heads, tokens, d = x.shape
    scale = torch.log1p(torch.exp(case.params["gamma"].reshape(heads * d)))
    y = (x.permute(0, 2, 1, 3).reshape(batch, tokens, heads * d).clamp_min(0) + 1e-6) / scale
    power = y ** case.options["power"]
    y = power * (y.norm(dim=-1, keepdim=True) / power.norm(dim=-1, keepdim=True))
    return y.reshape(batch, tokens, heads, d).permute(0, 2, 1, 3)


def routing(case: Case) -> Tensor:
    kernel = torch.einsum("bhid,bhjd->bhij", phi(case, case.q), phi(case, case.k + positions(case)))
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * kernel.shape[-1])
