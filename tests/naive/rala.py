import torch
from torch import Tensor

from tests.naive import Case


def phi(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def routing(case: Case) -> Tensor:
    count, valid = case.valid.sum(-1)[:, None, None], case.valid[:, None]
    mean_query = torch.einsum("bhnd,bn->bhd", phi(case.q), case.valid) / count
    scores = torch.exp(case.scale * torch.einsum("bhd,bhjd->bhj", mean_query, phi(case.k))) * valid
    alpha = count * scores / scores.sum(-1, keepdim=True)
    kernel = torch.einsum("bhid,bhj,bhjd->bhij", phi(case.q), alpha, phi(case.k))
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * count[..., None])


def finish(case: Case, heads: Tensor) -> Tensor:
    weight, bias = case.params["output_gate.weight"], case.params["output_gate.bias"]
    batch, h, tokens, d = heads.shape
    factor = torch.einsum("bnc,oc->bno", case.x, weight) + bias
    return heads * factor.reshape(batch, tokens, h, d).permute(0, 2, 1, 3)
