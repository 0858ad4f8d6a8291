import torch
from torch import Tensor

from tests.naive import Case


def psi(case: Case, t: Tensor) -> list[Tensor]:
    """One tensor like t for each output of the scalar perceptron."""
    p = case.params
    hidden = [(u * t + c).clamp_min(0) for u, c in zip(p["scalar_in.weight"][:, 0], p["scalar_in.bias"], strict=True)]
    outputs = zip(p["scalar_out.weight"], p["scalar_out.bias"], strict=True)
    return [
        (torch.stack([a * h for a, h in zip(row, hidden, strict=True)]).sum(0) + e).clamp_min(0) for row, e in outputs
    ]


def phi(case: Case, x: Tensor) -> Tensor:
    m = case.options["projections"]
    directions, offsets = case.params["directions.weight"], case.params["directions.bias"]
    features = []
    for w, b in zip(directions, offsets, strict=True):
        features += psi(case, torch.einsum("bhnd,d->bhn", x, w) + b)
    return torch.stack(features, dim=-1) / m**0.5


def routing(case: Case) -> Tensor:
    kernel = torch.einsum("bhid,bhjd->bhij", phi(case, case.q), phi(case, case.k)) * case.valid[:, None, None]
    count = case.valid.sum(-1)[:, None, None, None]
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * count)
