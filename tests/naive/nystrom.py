import torch
from torch import Tensor

from tests.naive import Case
from tests.naive.agent import landmark_grid, pool, softmax


def inverse(matrix: Tensor) -> Tensor:
    """Six steps of the paper's equation, from the transpose over the product of the two induced norms."""
    norms = matrix.abs().sum(-2).amax(-1) * matrix.abs().sum(-1).amax(-1)
    z = matrix.transpose(-2, -1) / norms[..., None, None]
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    for _ in range(6):
        az = matrix @ z
        z = z @ (13 * one - 15 * az + 7 * az @ az - az @ az @ az) / 4
    return z


def routing(case: Case) -> Tensor:
    cells = landmark_grid(*case.grid, case.options["landmarks"])
    q, k = (pool(x, case.grid, case.prefix, cells) for x in (case.q, case.k))
    left = softmax(case.scale * torch.einsum("bhid,bhmd->bhim", case.q, k), -1)
    middle = softmax(case.scale * torch.einsum("bhnd,bhmd->bhnm", q, k), -1)
    right = softmax(case.scale * torch.einsum("bhmd,bhjd->bhmj", q, case.k), -1)
    return left @ inverse(middle) @ right
