import torch
from torch import Tensor

from tests.naive import Case


def normalised(case: Case, x: Tensor) -> Tensor:
    x = x * case.valid[:, None, :, None]
    return x / x.abs().sum(2, keepdim=True)


def routing(case: Case) -> Tensor:
    return torch.einsum("bhid,bhjd->bhij", normalised(case, case.q), normalised(case, case.k))
