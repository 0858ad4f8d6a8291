import math

import torch
from torch import Tensor

from tests.naive import Case


def routing(case: Case) -> Tensor:
    rows, columns = case.grid
    places = [(0, 0)] * case.prefix + [(r, c) for r in range(rows) for c in range(columns)]
    decay = torch.tensor(
        [
            [math.cos(math.pi * (r - s) / (2 * rows)) * math.cos(math.pi * (c - e) / (2 * columns)) for s, e in places]
            for r, c in places
        ],
        dtype=torch.float64,
    )
    kernel = torch.einsum("bhid,bhjd->bhij", case.q.clamp_min(0), case.k.clamp_min(0)) * decay
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * kernel.shape[-1])
