"""The one module put into models, and the contracts of what plugs into it.

``LinearAttention`` = *project* and *merge* of a site kind around an *operator*. With the exact ``softmax`` operator in
between, the model's output must not change; that identity is the test which every site kind passes.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridRef, HeadGeometry
from vit2linear.errors import SurgeryError
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
    carries: ClassVar[frozenset[str]] = frozenset({"key_mask"})
    """What of the context the operator takes into account: ``key_mask``, ``bias``."""
    linear: ClassVar[bool] = True
    """Whether the cost grows linearly with the number of tokens."""
    has_map: ClassVar[bool] = True
    """Whether ``map`` exists: the heads are a matrix of tokens by tokens times v."""
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

    def order(self, ctx: AttentionContext) -> str:
        """``linear`` or ``quadratic``: how the tokens of ``ctx`` would be routed."""
        return "linear" if self.linear else "quadratic"

    def evaluation(self, grid: tuple[int, int], num_prefix: int) -> str:
        """Evaluation order, and number of landmarks, for a grid of patches; for the plan."""
        patches = grid[0] * grid[1]
        x = torch.empty(1, patches + num_prefix, self.geometry.width, device="meta")
        landmarks = self.landmarks(patches)
        text = f"{self.order(AttentionContext(x, grid, num_prefix))} order"
        return text if landmarks is None else f"{text}, {landmarks} landmarks"

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """The routing matrix A with ``forward = A v``, for reports and tests; quadratic in memory."""
        raise NotImplementedError(f"{self.name} has no routing map")


class SiteKind(ABC):
    """How one kind of attention module is recognised and taken apart. One file in ``sites/`` each."""

    output: ClassVar[str]
    """Name of the child that is the output projection."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind."""

    @abstractmethod
    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The module's sizes."""

    @abstractmethod
    def project(
        self, site: Any, x: Float[Tensor, "batch tokens channels"], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """q, k, v as (batch, heads, tokens, head_dim), normalised and rotated as in the source, and the context.

        ``site`` is the ``LinearAttention``, which has everything that the replaced module had.
        """

    @abstractmethod
    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Everything after the routing: norms, gates, output projection."""


class LinearAttention(nn.Module):
    """A site with its softmax replaced.

    It adopts everything of the module it replaces (children, parameters, buffers, sizes) under the same names and adds
    one child ``op``, so the new state dict is the old one plus ``*.op.*``.
    """

    op: Operator
    num_heads: int
    head_dim: int

    def __init__(self, module: nn.Module, kind: SiteKind, op: Operator, grid_ref: GridRef) -> None:
        super().__init__()
        # Containers are copied, so that the replaced module is left as it was.
        self.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in vars(module).items()})
        self.kind = kind
        self.grid_ref = grid_ref
        self.op = op

    def forward(self, x: Float[Tensor, "batch tokens channels"], *args: Any, **kwargs: Any) -> Tensor:
        """The signature of the replaced module; returns (batch, tokens, channels)."""
        q, k, v, ctx = self.kind.project(self, x, *args, **kwargs)
        if ctx.bias is not None and "bias" not in self.op.carries:
            raise SurgeryError(
                f"a mask or bias over pairs of tokens reached the operator {self.op.name!r}, which cannot carry it.",
                "Pass a key mask of shape (batch, 1, 1, tokens), or keep softmax at this site.",
            )
        return self.kind.merge(self, self.op.route(q, k, v, ctx), ctx)


@dataclass(frozen=True)
class Site:
    """One softmax attention module in a model."""

    path: str
    """Dotted path of the module."""
    kind: str
    """Name of the site kind."""
    geometry: HeadGeometry


def set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def sites_of(model: nn.Module) -> dict[str, LinearAttention]:
    """Path to module for every converted site of ``model``."""
    return {path: m for path, m in model.named_modules() if isinstance(m, LinearAttention)}


def key_mask_or_bias(
    attn_mask: Tensor | None, x: Float[Tensor, "batch tokens channels"]
) -> tuple[Bool[Tensor, "batch keys"] | None, Tensor | None]:
    """Split a mask as timm passes it: boolean and the same for all queries is a key mask, all else is a bias."""
    if attn_mask is None:
        return None, None
    if attn_mask.dtype != torch.bool:
        return None, attn_mask
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    if mask.shape[1] == mask.shape[2] == 1:
        return mask[:, 0, 0].expand(x.shape[0], -1), None
    return None, torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, float("-inf"))
