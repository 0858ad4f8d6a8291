"""The contract of what replaces the softmax: ``op(q, k, v, ctx) -> heads``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.modifiers import LocalBranch, Modifiers, centered


class Operator(nn.Module, ABC):
    """What replaces the softmax: ``op(q, k, v, ctx) -> heads``. One file in ``ops/`` each."""

    name: ClassVar[str]
    family: ClassVar[str]
    """kernel, learned kernel, affine, landmark, block, test-time training, or exact."""
    summary: ClassVar[str]
    """One line: the formula."""
    reference: ClassVar[str]
    """Paper and arXiv id."""
    notes: ClassVar[str] = ""
    """What somebody who converts a model should know: how it differs from the paper's code, what becomes of weights."""
    cost: ClassVar[str] = "2 N d^2"
    """Multiplications of one head for N tokens and head width d, in the order that long sequences take."""
    carries: frozenset[str] = frozenset({"key_mask"})
    """What the operator takes into account besides q, k and v: ``key_mask``, ``bias`` (on pairs of tokens),
    ``head_mix`` (talking heads), ``pooling`` (queries and keys that are different tokens, and neither of them those of
    the grid and the input in the context). An instance may carry less, if its options say so."""
    linear: ClassVar[bool] = True
    """Whether the cost grows linearly with the number of tokens."""
    has_map: ClassVar[bool] = True
    """Whether ``map`` exists: the heads are a matrix of tokens by tokens times v."""
    signed: ClassVar[bool] = False
    """Whether entries of the map can be negative."""
    streams: ClassVar[int] = 1
    """Maps of one head: the value's channels are split into so many equal parts, each routed by a map of its own."""

    @dataclass(frozen=True)
    class Options:
        """The operator's own options, all with defaults."""

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__()
        self.geometry = geometry
        self.options = options
        self.center_keys = False
        self.local: LocalBranch | None = None

    def add_modifiers(self, modifiers: Modifiers) -> None:
        """Compose with the modifiers that the recipe asks for; their parameters join under this operator."""
        self.center_keys = modifiers.center_keys
        if modifiers.local != "none":
            self.local = LocalBranch(self.geometry.num_heads * self.geometry.head_dim, modifiers.local)

    def route(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """The operator with its modifiers: what a site calls."""
        if self.center_keys:
            k = centered(k, ctx.key_mask)
        heads: Tensor = self(q, k, v, ctx)
        return heads if self.local is None else self.local(heads, v, ctx)

    @abstractmethod
    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Route the values."""

    def landmarks(self, patches: int) -> int | None:
        """How many landmarks at most a grid of so many patches is routed through; ``None``: the operator has none."""
        return None

    def order(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> str:
        """``linear`` or ``quadratic``: how these tokens would be routed."""
        return "linear" if self.linear else "quadratic"

    def evaluation(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> str:
        """Evaluation order, and number of landmarks, in words; for the plan."""
        landmarks = None if ctx.grid is None else self.landmarks(ctx.grid[0] * ctx.grid[1])
        text = f"{self.order(q, k, v, ctx)} order"
        return text if landmarks is None else f"{text}, {landmarks} landmarks"

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """The routing matrix A with ``forward = A v``, for reports and tests; quadratic in memory."""
        raise NotImplementedError(f"{self.name} has no routing map")
