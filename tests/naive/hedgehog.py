import torch
from torch import Tensor

from tests.naive import Case


def phi(case: Case, x: Tensor, which: str) -> Tensor:
    y = torch.einsum("bhnd,hed->bhne", x, case.params[f"weight_{which}"]) + case.params[f"bias_{which}"]
    halves = [torch.exp(sign * y) / torch.exp(sign * y).sum(-1, keepdim=True) for sign in (1, -1)]
    return torch.cat(halves, dim=-1)


def routing(case: Case) -> Tensor:
    kernel = torch.einsum("bhid,bhjd->bhij", phi(case, case.q, "q"), phi(case, case.k, "k"))
    kernel = kernel * case.valid[:, None, None]
    count = case.valid.sum(-1)[:, None, None, None]
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * count)
