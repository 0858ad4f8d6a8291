import torch
from torch import Tensor

from tests.naive import Case


def phi(case: Case, x: Tensor) -> Tensor:
    return (torch.einsum("bhnd,hed->bhne", x, case.params["weight"]) + case.params["bias"]).clamp_min(0)


def routing(case: Case) -> Tensor:
    kernel = torch.einsum("bhid,bhjd->bhij", phi(case, case.q), phi(case, case.k)) * case.valid[:, None, None]
    count = case.valid.sum(-1)[:, None, None, None]
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * count)
