"""From the name that a user types to a source at one commit.

An existing folder wins over a Hub id of the same name; ``local-dir:`` and ``hf-hub:`` (timm's prefixes) decide it
explicitly. Nothing but ``config.json`` is fetched.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from vit2linear import hub
from vit2linear.errors import SourceNotFoundError, UnsupportedModelError
from vit2linear.registry import Registry
from vit2linear.sources.base import Layout, ModelRef

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo"
LAYOUTS: Registry[Layout] = Registry("layout", "vit2linear.sources", "vit2linear.sources.base:Layout")


def resolve(name: str, revision: str | None = None) -> ModelRef:
    """Find a source.

    Args:
        name: ``demo``, a folder, ``local-dir:PATH``, a Hub id ``owner/name[@revision]``, ``hf-hub:ID``, or a name of
            timm's registry with or without a tag.
        revision: branch, tag or commit of a Hub id.

    Raises:
        SourceNotFoundError, GatedSourceError, UnreachableHubError
    """
    if name == DEMO:
        return ModelRef(name, folder=DEMO_FOLDER)
    prefix, _, rest = name.partition(":")
    if prefix == "local-dir" or (prefix != "hf-hub" and Path(name).is_dir()):
        return _folder(name, Path(rest if prefix == "local-dir" else name))
    repo = rest if prefix == "hf-hub" else name
    if prefix != "hf-hub" and "/" not in name:
        return _registry(name)
    repo, _, at = repo.partition("@")
    return ModelRef(name, repo=hub.repo_info(repo, revision or at or None))


def layout_of(ref: ModelRef) -> Layout:
    """The layout that the source's ``config.json`` is in.

    Raises:
        SourceNotFoundError: there is no ``config.json``.
        UnsupportedModelError: it is none of the layouts.
    """
    layouts = {name: layout() for name, layout in LAYOUTS.all().items()}
    if ref.registry_name is not None:
        return layouts["timm"]
    config = ref.json("config.json")
    if config is None:
        raise SourceNotFoundError(f"{ref.name!r} has no config.json.", "A timm or transformers checkpoint has one.")
    for layout in layouts.values():
        if layout.matches(config):
            return layout
    raise UnsupportedModelError(
        f"config.json of {ref.name!r} has neither 'architecture' nor 'model_type'.",
        f"Supported layouts: {', '.join(layouts)}.",
    )


def _folder(name: str, folder: Path) -> ModelRef:
    if not folder.is_dir():
        raise SourceNotFoundError(f"there is no folder {str(folder)!r}.", "Check the path.")
    return ModelRef(name, folder=folder)


def _registry(name: str) -> ModelRef:
    import timm

    cfg = timm.get_pretrained_cfg(name, allow_unregistered=False) if timm.is_model(name.split(".")[0]) else None
    if cfg is None:
        close = get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        guess = f"Close names: {', '.join(close)}." if close else "Use owner/name for the Hub, or the path of a folder."
        raise SourceNotFoundError(f"{name!r} is neither a folder nor a name that timm knows.", guess)
    if not cfg.hf_hub_id:
        raise SourceNotFoundError(f"timm has no weights on the Hub for {name!r}.", "Choose another tag, or a folder.")
    return ModelRef(name, repo=hub.repo_info(cfg.hf_hub_id), registry_name=name)
