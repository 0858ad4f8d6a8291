"""Nyström attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.operator import Operator
from vit2linear.ops._landmarks import LandmarkOperator
from vit2linear.ops.base import count_keys


class NystromAttention(LandmarkOperator):
    """A = softmax(s q l_k^T) pinv(softmax(s l_q l_k^T)) softmax(s l_q k^T), l_q and l_k pooled (arXiv 2102.03902)."""

    name = "nystrom"
    signed = True  # by the approximate inverse
    summary = "softmax(q l_k^T) pinv(softmax(l_q l_k^T)) softmax(l_q k^T), landmarks l are pooled queries and keys"
    reference = "Nyströmformer, arXiv 2102.03902"
    notes = (
        "All copied weights keep their meaning. Landmarks are means over cells of the grid, in the paper over segments "
        "of the sequence, and each matrix has its own first inverse, in the code the batch has one. Signed: the six "
        "steps of the inverse rarely converge, and rows sum to about 1 only. At 196 patches it is slower than softmax."
    )
    cost = "4 N m d + N m^2 + 24 m^3 for m landmarks"

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """How many landmarks."""

        landmarks: int = 64
        """Landmarks; never more than a quarter of the patches. The paper takes 64."""

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """N softmax(s q l_k^T) pinv(softmax(s l_q l_k^T)) and the transpose of softmax(s l_q k^T)."""
        q_landmarks, k_landmarks = self.pool(q, ctx), self.pool(k, ctx) * self.geometry.scale
        # Rows of queries and of their landmarks in one product.
        rows = (torch.cat([q, q_landmarks], dim=2) @ k_landmarks.mT).softmax(-1)
        to_landmarks, middle = rows.split([q.shape[2], q_landmarks.shape[2]], dim=2)
        to_keys = (q_landmarks * self.geometry.scale @ k.mT).softmax(-1)
        return to_landmarks @ (pseudo_inverse(middle) * count_keys(k, ctx)), to_keys.mT


def pseudo_inverse(
    matrix: Float[Tensor, "batch heads landmarks landmarks"], steps: int = 6
) -> Float[Tensor, "batch heads landmarks landmarks"]:
    """Third-order iteration towards the Moore-Penrose inverse of matrices whose rows sum to 1 (equation 11)."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse = matrix.mT / matrix.sum(-2, keepdim=True).amax(-1, keepdim=True)
    for _ in range(steps):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * eye - product @ (15 * eye - product @ (7 * eye - product)))
    return inverse
