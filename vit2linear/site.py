"""The one module put into models, and the contract of the kinds of attention that it takes apart.

``LinearAttention`` = *project* and *merge* of a site kind around an *operator*. With the exact ``softmax`` operator in
between, the model's output must not change; that identity is the test which every site kind passes.
"""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, GridRef, HeadGeometry, patch_embedding_grid
from vit2linear.errors import SurgeryError
from vit2linear.operator import Operator


@dataclass(frozen=True)
class Feature:
    """Something of the source's attention besides q, k and v, which an operator must carry or the user give up."""

    words: str
    """What it is, for the plan and the card."""
    needs: str
    """The entry of ``Operator.carries`` that carries it."""
    parameters: tuple[str, ...] = ()
    """Parameters and children of the module that serve nothing else: removed where the feature is dropped."""
    droppable: bool = True
    """Whether the module makes sense without it."""
    globally: Literal["as ever", "moot", "lost"] = "as ever"
    """With global windows: as without them, or not needed any more, or made for one window and carried by nothing."""
    shared: str = ""
    """Module of the model that serves nothing else, at all sites: removed where every site drops the feature."""

    def missed(self, carries: Collection[str], global_windows: bool) -> bool:
        """Whether an operator that carries ``carries`` loses it."""
        if global_windows and self.globally != "as ever":
            return self.globally == "lost"
        return self.needs not in carries


class SiteKind(ABC):
    """How one kind of attention module is recognised and taken apart. One file in ``sites/`` each."""

    models: ClassVar[tuple[str, ...]] = ()
    """Classes of timm models that the kind is for, tried before the kinds that name none."""
    output: ClassVar[str] = "proj"
    """Name of the child that is the output projection."""
    whole_block: ClassVar[bool] = False
    """Whether the module is a block, with its MLP, rather than an attention module."""
    windowed: ClassVar[bool] = False
    """Whether ``project`` and ``merge`` can route over the whole map where the source routes inside windows."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Attributes of the model that change with its sites, such as the form in which it passes masks."""
    methods: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Methods of the site instead of the replaced module's, where those cannot bear that something was dropped."""

    @abstractmethod
    def matches(self, module: nn.Module) -> bool:
        """Whether ``module`` is of this kind."""

    def at(self, model: nn.Module, path: str) -> SiteKind:
        """The kind at one site: looks up what the module itself does not know. Called before all but ``matches``."""
        return self

    @abstractmethod
    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The module's sizes."""

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """What the module has besides q, k and v, by the names that ``--drop`` takes."""
        return {}

    def window(self, module: nn.Module) -> int | None:
        """Tokens of the windows inside which the module attends; ``None``: it sees the whole map."""
        return None

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """The module whose forward tells the grid of the site at ``path``, and how; ``None``: the site knows itself."""
        name = patch_embedding_of(model, path)
        return None if name is None else (name, patch_embedding_grid)

    def num_prefix(self, model: nn.Module, path: str) -> int:
        """Tokens before the patches."""
        return int(getattr(model, "num_prefix_tokens", 0))

    @abstractmethod
    def project(
        self, site: Any, x: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """q, k, v as (batch, heads, tokens, head_dim), normalised and rotated as in the source, and the context.

        ``site`` is the ``LinearAttention``, which has everything that the replaced module had, methods included.
        """

    @abstractmethod
    def merge(self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext) -> Any:
        """Everything after the routing (norms, gates, output projection): what the replaced module returned."""

    def answer(self, x: Tensor, output: Any) -> Tensor:
        """The tokens that losses compare at a site, from the module's input and output: without a residual."""
        return site_output(output)


class LinearAttention(nn.Module):
    """A site with its softmax replaced.

    It adopts everything of the module it replaces (children, parameters, buffers, sizes) under the same names and adds
    one child ``op``, so the new state dict is the old one plus ``*.op.*``, less what the user agreed to drop.
    """

    op: Operator
    num_heads: int
    head_dim: int

    def __init__(
        self,
        module: nn.Module,
        kind: SiteKind,
        op: Operator,
        grid_ref: GridRef,
        dropped: Collection[str] = (),
        global_windows: bool = False,
    ) -> None:
        super().__init__()
        # Containers are copied, so that the replaced module is left as it was.
        self.__dict__.update({k: copy.copy(v) if isinstance(v, dict | set) else v for k, v in vars(module).items()})
        self.source_class = type(module)
        self.kind = kind
        self.grid_ref = grid_ref
        self.dropped = frozenset(dropped)
        self.global_windows = global_windows
        for name in dropped_names(kind, module, dropped):
            setattr(self, name, None)
        self.op = op

    def __getattr__(self, name: str) -> Any:
        """Methods of the replaced class work on what was adopted."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            kind = self.__dict__.get("kind")
            own = None if kind is None else kind.methods.get(name)
            method = own or getattr(self.__dict__.get("source_class"), name, None)
            if isinstance(method, types.FunctionType):
                return types.MethodType(method, self)
            raise

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The signature and the result of the replaced module."""
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
    window: int | None = None
    """Tokens of its windows; ``None``: it sees the whole map."""


def dropped_names(kind: SiteKind, module: nn.Module, dropped: Collection[str]) -> tuple[str, ...]:
    """Parameters and children of ``module`` that go with the features ``dropped``."""
    return tuple(n for name, feature in kind.features(module).items() if name in dropped for n in feature.parameters)


def patch_embedding_of(model: nn.Module, path: str) -> str | None:
    """Path of the ``patch_embed`` of the innermost module around ``path`` that has one."""
    while path:
        path = path.rpartition(".")[0]
        if hasattr(model.get_submodule(path), "patch_embed"):
            return f"{path}.patch_embed".lstrip(".")
    return None


def set_submodule(model: nn.Module, path: str, module: nn.Module | None) -> None:
    """Replace or remove the module at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def sites_of(model: nn.Module) -> dict[str, LinearAttention]:
    """Path to module for every converted site of ``model``."""
    return {path: m for path, m in model.named_modules() if isinstance(m, LinearAttention)}


def site_output(output: Any) -> Tensor:
    """The tokens of what a site returned: some attentions return their grid as well, or tokens as a map."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens.flatten(1, -2)


def key_mask_or_bias(attn_mask: Tensor | None, x: Tensor) -> tuple[Bool[Tensor, "batch keys"] | None, Tensor | None]:
    """Split a mask as timm passes it: boolean and the same for all queries is a key mask, all else is a bias.

    Args:
        attn_mask: boolean (true: attend) or additive, broadcastable to (batch, heads, queries, keys).
        x: the module's input, (batch, tokens, channels).
    """
    if attn_mask is None:
        return None, None
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    if mask.shape[1] == mask.shape[2] == 1 and mask.dtype == torch.bool:
        return mask[:, 0, 0].expand(x.shape[0], -1), None
    if mask.dtype != torch.bool:
        return None, mask
    return None, torch.zeros_like(mask, dtype=x.dtype).masked_fill_(~mask, float("-inf"))
