import torch
from torch import Tensor

from tests.naive import Case


def phi(case: Case, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """exp(w.x' - |x'|^2 / 2), divided by its largest value over ``dims``."""
    scaled = x * case.scale**0.5
    matrix = case.params["projection"]
    squares = torch.einsum("bhnd,bhnd->bhn", scaled, scaled)
    values = torch.exp(torch.einsum("bhnd,rd->bhnr", scaled, matrix) - squares[..., None] / 2)
    return (values / values.amax(dims, keepdim=True) + 1e-6) / matrix.shape[0] ** 0.5


def routing(case: Case) -> Tensor:
    kernel = torch.einsum("bhir,bhjr->bhij", phi(case, case.q, (3,)), phi(case, case.k, (2, 3)))
    return kernel / kernel.sum(-1, keepdim=True)
