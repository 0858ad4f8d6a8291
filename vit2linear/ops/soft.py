"""Softmax-free attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.operator import Operator
from vit2linear.ops._landmarks import LandmarkOperator
from vit2linear.ops.base import count_keys


class SoftmaxFreeAttention(LandmarkOperator):
    """A = K_nl D^(-1/2) K_ll^(-1) D^(-1/2) K_ln, K a Gaussian kernel of queries, D the degrees of K_ll (SOFT++)."""

    name = "soft"
    signed = True  # by the approximate inverse
    summary = "K_nl D^(-1/2) K_ll^(-1) D^(-1/2) K_ln, K_ij = exp(-|q_i - q_j|^2 / 2 sqrt(d)), landmarks are pooled"
    reference = "SOFT++, arXiv 2207.03341"
    notes = (
        "Queries serve as keys, so the copied key weights are left unused, and a conversion starts far from softmax. "
        "Landmarks are average pools, where the code has a strided convolution; rows do not sum to 1. At 196 patches "
        "it is slower than softmax. The code adds a convolution with one kernel for each head (nearest: --local dwc5)."
    )
    cost = "3 N m d + N m^2 + 42 m^3 for m landmarks"

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """How many landmarks."""

        landmarks: int = 49
        """Landmarks; never more than a quarter of the patches. The paper takes 49."""

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """N K_nl D^(-1/2) K_ll^(-1) D^(-1/2) and K_nl; ``k`` is ignored."""
        q = q * self.geometry.scale**0.5
        landmarks = self.pool(q, ctx)
        phi, middle = gaussian(q, landmarks), gaussian(landmarks, landmarks)
        degree = middle.sum(-1, keepdim=True).rsqrt()
        return phi @ (degree * newton_inverse(middle) * degree.mT * count_keys(q, ctx)), phi


def gaussian(
    x: Float[Tensor, "batch heads n head_dim"], y: Float[Tensor, "batch heads m head_dim"]
) -> Float[Tensor, "batch heads n m"]:
    """exp(-|x_i - y_j|^2 / 2)."""
    lengths = x.square().sum(-1, keepdim=True) + y.square().sum(-1).unsqueeze(-2)
    return (x @ y.mT - lengths / 2).exp()


def newton_inverse(
    matrix: Float[Tensor, "batch heads m m"], steps: int = 20, ridge: float = 0.01
) -> Float[Tensor, "batch heads m m"]:
    """Inverse of ``matrix + ridge I`` (positive definite) by Newton's iteration Y <- 2 Y - Y M Y.

    Only the last step is on the tape: its gradient -Y G Y is that of the inverse itself, as in the paper, and the
    steps before it keep no memory.
    """
    matrix = matrix + ridge * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    with torch.no_grad():
        inverse = matrix / matrix.sum(-1).amax(-1)[..., None, None].square()
        for _ in range(steps):
            inverse = 2 * inverse - inverse @ matrix @ inverse
    return 2 * inverse - inverse @ matrix @ inverse
