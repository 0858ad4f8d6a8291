"""Whether an exported graph forms a map over pairs of tokens where the model was converted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.audit import softmax_pairs
from vit2linear.errors import UnsupportedModelError
from vit2linear.graphs import Graph, Value, program_values
from vit2linear.site import sites_of
from vit2linear.sizes import Size
from vit2linear.tracing import random_pixels, trace

BATCH = 3
"""Images in the runs: not one, which would make windows and tokens alike."""
Pairs = Mapping[str, tuple[int, int]]
"""Numbers of queries and keys, by the path of the module that routes them."""

Hits = dict[str, set[tuple[int, int]]]
"""Paths of modules, and the numbers of queries and keys that dimensions of their values have."""


@dataclass(frozen=True)
class Maps:
    """What a search found."""

    values: int
    """Values that were looked at."""
    maps: tuple[str, ...]
    """Modules with a map: those that keep the softmax, or whose operator is not linear."""
    unclear: tuple[str, ...]
    """Modules of which shapes cannot tell, because tokens and channels are as many."""


def search(graph: Graph, model: nn.Module, sizes: Collection[Size], build: Callable[[Size], nn.Module]) -> Maps:
    """Look at the shapes of all values, in one run at each of ``sizes``.

    Args:
        graph: the exported model.
        model: what it was made of.
        sizes: height and width in pixels, all that the graph is checked at.
        build: makes the model for another size, where one alone leaves doubts.

    Raises:
        UnsupportedModelError: a map is where the model was converted, or none is where the softmax was kept.
    """
    stray: Hits | None = None
    for size in sizes:
        pixels = random_pixels(model, BATCH, size)
        pairs, kept = token_pairs(model, pixels)
        values = graph.values(pixels)
        found = modules_with_maps(values, pairs)
        stray = {p: found[p] for p in (found if stray is None else stray) if p in found and not related(p, kept)}
        silent = sorted(path for path in kept if not related(path, found))
        if silent:
            raise UnsupportedModelError(f"the exported graph has no softmax at {', '.join(silent)}; nothing was kept.")
    maps: set[str] = set(stray or ())
    unclear: set[str] = set()
    if stray and len(sizes) == 1:
        maps, unclear = _at_twice_the_size(stray, pairs, size, build)
    if maps:
        raise UnsupportedModelError(
            f"the exported graph forms a map over pairs of tokens in {', '.join(sorted(maps))}, where no softmax is "
            "kept; nothing was kept.",
        )
    return Maps(len(values), tuple(sorted(path.removesuffix(".op") for path in kept)), tuple(sorted(unclear)))


def token_pairs(model: nn.Module, pixels: Float[Tensor, "batch channels height width"]) -> tuple[Pairs, Pairs]:
    """Queries and keys of every routing in one forward of ``model``; and of those that form a map of pairs."""
    found: dict[str, tuple[int, int]] = {}

    def noting(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            found[path] = args[0].shape[-2], args[1].shape[-2]

        return hook

    sites = {f"{path}.op": site.op for path, site in sites_of(model).items()}
    hooks = [op.register_forward_pre_hook(noting(path)) for path, op in sites.items()]
    try:
        kept = softmax_pairs(model, pixels)
    finally:
        for hook in hooks:
            hook.remove()
    kept |= {path: found[path] for path, op in sites.items() if not op.linear}
    return {**found, **kept}, kept


def modules_with_maps(values: Iterable[Value], pairs: Pairs) -> Hits:
    """Paths of the modules in which a value has one dimension of queries and another one of keys, and how many.

    Away from the modules in ``pairs``, it has to end in the two.
    """
    found: Hits = {}
    for value in values:
        shape = value.shape
        own = {pair for path, pair in pairs.items() if related(value.module, [path])}
        ends = {(shape[-2], shape[-1])} if len(shape) > 2 else set()
        inside = {(a, b) for i, a in enumerate(shape) for j, b in enumerate(shape) if i != j}
        hits = inside & own if own else ends & set(pairs.values())
        if hits:
            found.setdefault(value.module, set()).update(hits)
    return found


def related(path: str, others: Collection[str]) -> bool:
    """Whether ``path`` is one of ``others``, lies in one or has one inside."""
    return bool(path) and any(f"{path}.".startswith(f"{o}.") or f"{o}.".startswith(f"{path}.") for o in others)


def _at_twice_the_size(
    stray: Hits, pairs: Pairs, size: Size, build: Callable[[Size], nn.Module]
) -> tuple[set[str], set[str]]:
    """Which modules of ``stray`` have a map, and of which it cannot be told.

    Where tokens are as many as channels, everything with those on two sides looks like a map, but not at another size;
    and maps inside windows stay as they are, so that all of them grow with the image and not with its square.
    """
    larger = 2 * size[0], 2 * size[1]
    try:
        model = build(larger)
    except UnsupportedModelError:
        return set(), set(stray)
    pixels = random_pixels(model, BATCH, larger)
    then = token_pairs(model, pixels)[0]
    growing = [(pairs[path], then[path]) for path in then if then[path] != pairs[path]]
    again = modules_with_maps(program_values(trace(model, larger), pixels), then)
    channels = _channels(model)
    maps: set[str] = set()
    unclear: set[str] = set()
    for path in stray.keys() & again.keys():
        for before, after in growing:
            if before in stray[path] and after in again[path]:
                (unclear if channels & {*before, *after} else maps).add(path)
    return maps, unclear - maps


def _channels(model: nn.Module) -> set[int]:
    """All sizes that values inside a site may have besides numbers of tokens, as far as weights tell."""
    sites = sites_of(model).values()
    sizes = {n for site in sites for tensor in site.state_dict().values() for n in tensor.shape}
    return sizes | {n for site in sites for n in (site.op.geometry.num_heads, site.op.geometry.head_dim)}
