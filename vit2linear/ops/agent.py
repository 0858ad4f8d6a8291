"""Agent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.operator import Operator
from vit2linear.ops._landmarks import LandmarkOperator, landmark_grid
from vit2linear.ops.base import count_keys


class AgentAttention(LandmarkOperator):
    """A = softmax(s q a^T + B2) softmax(s a k^T + B1) with agents a, the pooled queries (arXiv 2312.08874)."""

    name = "agent"
    summary = "softmax(q a^T / sqrt(d)) softmax(a k^T / sqrt(d)), agents a are pooled queries, rows sum to 1"
    reference = "Agent Attention, arXiv 2312.08874"
    notes = (
        "All copied weights keep their meaning. Of the paper's biases those for whole rows and columns, tied to one "
        "grid, are left out, and all prefix tokens share one scalar for each agent. "
        "The paper adds a 3x3 depthwise convolution (--local dwc3)."
    )
    cost = "4 N m d for m agents"

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """How many agents, and whether they have biases."""

        landmarks: int = 49
        """Agents; never more than a quarter of the patches. The paper takes 49, and 81 for Base."""
        bias: bool = False
        """Position biases between agents and tokens: 7 x 7 tables, zero at first, interpolated to the grid."""

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        self.patch_bias = self.prefix_bias = None
        if options.bias:
            # Two biases, agents to keys and queries to agents; on other grids agents are interpolated like patches.
            agents = (2, geometry.num_heads, *landmark_grid(7, 7, options.landmarks))
            self.patch_bias = nn.Parameter(torch.zeros(*agents, 7, 7))
            self.prefix_bias = nn.Parameter(torch.zeros(agents))

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """softmax over agents of s q a^T, N times softmax over tokens of s k a^T."""
        agents = self.pool(q, ctx) * self.geometry.scale
        to_keys, to_agents = agents @ k.mT, q @ agents.mT
        if self.patch_bias is not None and self.prefix_bias is not None:
            agent_bias, query_bias = self._bias(self.patch_bias.to(q.dtype), self.prefix_bias.to(q.dtype), ctx)
            to_keys, to_agents = to_keys + agent_bias, to_agents + query_bias.mT
        return to_agents.softmax(-1), to_keys.softmax(-1).mT * count_keys(k, ctx)

    def _bias(
        self, patch: Float[Tensor, "2 heads a b 7 7"], prefix: Float[Tensor, "2 heads a b"], ctx: AttentionContext
    ) -> Float[Tensor, "2 heads landmarks tokens"]:
        """Both biases on the running grid, bilinear in agents and in patches."""
        sizes = zip(patch.shape[2:], (*self.pooled_grid(ctx), *ctx.patch_grid()), strict=True)
        r, c, i, j = (_linear(old, new, patch) for old, new in sizes)
        patch = torch.einsum("shabyx,ra,cb,iy,jx->shrcij", patch, r, c, i, j).flatten(4)
        prefix = torch.einsum("shab,ra,cb->shrc", prefix, r, c)
        prefix = prefix.unsqueeze(-1).expand(*prefix.shape, ctx.num_prefix)
        return torch.cat([prefix, patch], dim=-1).flatten(2, 3)


def _linear(size: int, new: int, like: Tensor) -> Float[Tensor, "new size"]:
    """The matrix of linear interpolation along one axis; as a matrix its gradient is deterministic on a GPU."""
    eye = torch.eye(size, dtype=like.dtype, device=like.device)
    return F.interpolate(eye[None], size=new, mode="linear")[0].mT
