import torch
from torch import Tensor

from tests.naive import Case


def routing(case: Case) -> Tensor:
    count = case.valid.sum(-1)[:, None, None, None]
    valid = case.valid[:, None, None]
    logits = case.scale * torch.einsum("bhid,bhjd->bhij", case.q, case.k)
    mean_key = torch.einsum("bhjd,bj->bhd", case.k, case.valid) / count[..., 0]
    mean_logit = case.scale * torch.einsum("bhid,bhd->bhi", case.q, mean_key)
    return valid * (1 + logits - mean_logit[..., None]) / count


def finish(case: Case, heads: Tensor) -> Tensor:
    """The local branch, which is an addition to the patch rows: 3x3 kernels of each channel of each image."""
    if not case.options["dyn3"]:
        return heads
    p, (batch, h, _, d) = case.params, case.v.shape
    mean = torch.einsum("bnc,bn->bc", case.x, case.valid) / case.valid.sum(-1, keepdim=True)
    groups = mean.reshape(batch, h, -1)
    first = torch.einsum("bgi,goi->bgo", groups, p["dyn3.kernels.0.weight"].reshape(h, d, -1))
    first = first + p["dyn3.kernels.0.bias"].reshape(h, d)
    first = first * 0.5 * (1 + torch.erf(first / 2**0.5))
    kernels = torch.einsum("bgi,goi->bgo", first, p["dyn3.kernels.2.weight"].reshape(h, 9 * d, d))
    kernels = (kernels + p["dyn3.kernels.2.bias"].reshape(h, 9 * d)).reshape(batch, h, d, 3, 3)
    rows, columns = case.grid
    values = (case.v * case.valid[:, None, :, None])[:, :, case.prefix :].reshape(batch, h, rows, columns, d)
    out = heads.clone()
    for r in range(rows):
        for c in range(columns):
            for dr in (-1, 0, 1):
                for dc in (-1, 0, 1):
                    if 0 <= r + dr < rows and 0 <= c + dc < columns:
                        term = kernels[..., dr + 1, dc + 1] * values[:, :, r + dr, c + dc]
                        out[:, :, case.prefix + r * columns + c] = out[:, :, case.prefix + r * columns + c] + term
    return out
