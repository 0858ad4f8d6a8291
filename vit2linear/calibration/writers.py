"""The linear layers through which a block writes into the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vit2linear.site import sites_of


@dataclass(frozen=True)
class Writer:
    """A module that ends in a linear layer that writes into the residual stream."""

    path: str
    module: nn.Module
    layer: nn.Linear
    gain: Tensor | None
    """The layer scale between layer and stream."""
    source: nn.Module | None
    """Its first input is the stream; ``None``: not known."""
    prefix: int


def writers_of(model: nn.Module) -> dict[str, Writer]:
    """Every site with its output projection and, in a plain pre-norm block around it, the MLP with its second layer."""
    sites = sites_of(model)
    found: dict[str, Writer] = {}
    for path, site in sites.items():
        block_path = path.rpartition(".")[0]
        block = model.get_submodule(block_path)
        alone = sum(p.startswith(f"{block_path}.") for p in sites) == 1
        layer, prefix = getattr(site, site.kind.output, None), site.grid_ref.num_prefix
        if isinstance(layer, nn.Linear):
            gain = _gain(block, 1)
            name = f"{path}.{site.kind.output}"
            found[name] = Writer(name, site, layer, gain, block if alone else None, prefix)
        mlp, norm = getattr(block, "mlp", None), getattr(block, "norm2", None)
        layer = getattr(mlp, "fc2", None)
        if alone and isinstance(layer, nn.Linear) and mlp is not None and norm is not None:
            name = f"{block_path}.mlp.fc2"
            found[name] = Writer(name, mlp, layer, _gain(block, 2), norm, prefix)
    return found


def _gain(block: nn.Module, number: int) -> Tensor | None:
    """The layer scale after attention (1) or MLP (2), under the names that timm gives it."""
    return getattr(getattr(block, f"ls{number}", None), "gamma", getattr(block, f"gamma_{number}", None))
