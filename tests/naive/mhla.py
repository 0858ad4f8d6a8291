import math

import torch
from torch import Tensor

from tests.naive import Case


def block_of(case: Case) -> list[int]:
    """0 for prefix tokens, then 1, 2, ... over blocks of equal size, cut off at the lower and right edges."""
    rows, columns = case.grid
    side = case.options["blocks"]
    height, width = math.ceil(rows / side), math.ceil(columns / side)
    patches = [1 + side * (r // height) + c // width for r in range(rows) for c in range(columns)]
    return [0] * case.prefix + patches


def routing(case: Case) -> Tensor:
    block = block_of(case)
    mixing = case.params["mixing"].abs()
    weights = torch.tensor([[mixing[i, j] for j in block] for i in block], dtype=torch.float64)
    kernel = weights * torch.einsum("bhid,bhjd->bhij", case.q.clamp_min(0), case.k.clamp_min(0))
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * len(block))
