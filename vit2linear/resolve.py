"""From the name that a user types to a source at one commit.

An existing folder or file wins over a Hub id of the same name; ``local-dir:`` and ``hf-hub:`` (timm's prefixes) decide
it explicitly. Nothing but the config is fetched.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import timm

from vit2linear import hub
from vit2linear.errors import SourceNotFoundError, UnsupportedModelError
from vit2linear.registry import Registry
from vit2linear.sources.base import Layout, ModelRef
from vit2linear.strict import shown

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent / "demo"
LONGEST = 4096
"""Characters of a path."""
LAYOUTS: Registry[Layout] = Registry("layout", "vit2linear.sources", "vit2linear.sources.base:Layout")


def resolve(name: str, revision: str | None = None, arch: str | None = None) -> ModelRef:
    """Find a source.

    Args:
        name: ``demo``, a folder, a file of weights, ``local-dir:PATH``, a Hub id ``owner/name[@revision]``,
            ``hf-hub:ID``, or a name of timm's registry with or without a tag.
        revision: branch, tag or commit of a Hub id.
        arch: timm's name of the architecture, with or without a tag, for weights that no config describes.

    Raises:
        SourceNotFoundError, GatedSourceError, UnreachableHubError: a path that is neither a folder nor a regular file
            counts as not found.
    """
    found = _find(name, revision)
    if arch is None:
        return found
    if found.registry_name is not None or name == DEMO:
        raise SourceNotFoundError(f"the architecture of {name!r} is known.", "Leave --arch out.")
    if not timm.is_model(arch.split(".")[0]):
        raise SourceNotFoundError(f"timm knows no architecture {arch!r}.", _guess(arch, "See timm.list_models()."))
    _check_tag(arch)
    return replace(found, arch=arch)


def layout_of(ref: ModelRef) -> Layout:
    """The layout that the source is in, by the file that describes it.

    Raises:
        SourceNotFoundError: there is no such file, nor a stated architecture.
        UnsupportedModelError: it is none of the layouts.
    """
    layouts = {name: layout() for name, layout in LAYOUTS.all().items()}
    if ref.arch is not None:
        return layouts["original"]
    if ref.registry_name is not None:
        return layouts["timm"]
    described = False
    for name in hub.CONFIGS if ref.weights_name is None else ():
        config = ref.json(name)
        described |= config is not None
        for layout in layouts.values():
            if config is not None and layout.config_file == name and layout.matches(config):
                return layout
    if not described:
        raise SourceNotFoundError(
            f"{ref.name!r} has no config.json.",
            "Say which architecture of timm its weights are of: --arch NAME, such as --arch vit_small_patch14_dinov2.",
        )
    raise UnsupportedModelError(
        f"config.json of {ref.name!r} has neither 'architecture' nor 'model_type'.",
        f"Supported layouts: {', '.join(layouts)}; for weights by themselves say --arch NAME.",
    )


def _find(name: str, revision: str | None) -> ModelRef:
    if not name or len(name) > LONGEST:
        raise SourceNotFoundError(f"{shown(name)} is no name of a model.", "Give owner/name, or the path of a folder.")
    if name == DEMO:
        return ModelRef(name, folder=DEMO_FOLDER)
    prefix, _, rest = name.partition(":")
    if prefix == "local-dir" or (prefix != "hf-hub" and os.path.lexists(name)):
        return _local(name, Path(rest if prefix == "local-dir" else name))
    repo = rest if prefix == "hf-hub" else name
    if prefix != "hf-hub" and "/" not in name:
        return _registry(name)
    repo, _, at = repo.partition("@")
    return ModelRef(name, repo=hub.repo_info(repo, revision or at or None))


def _local(name: str, path: Path) -> ModelRef:
    try:
        mode = path.stat().st_mode
        allowed = os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(mode) else 0))
    except FileNotFoundError as error:
        gone = "is a link to what is not there" if path.is_symlink() else "is not there"
        raise SourceNotFoundError(f"there is no folder {str(path)!r}: it {gone}.", "Check the path.") from error
    except OSError as error:
        raise SourceNotFoundError(f"{str(path)!r} cannot be read: {error.strerror}.", "Check the path.") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise SourceNotFoundError(
            f"{str(path)!r} is a device, pipe or socket.", "Name a folder, or a regular file of weights."
        )
    if not allowed:
        raise SourceNotFoundError(f"{str(path)!r} may not be read by this user.", "Check its permissions.")
    return ModelRef(name, folder=path) if stat.S_ISDIR(mode) else ModelRef(name, path.parent, weights_name=path.name)


def _registry(name: str) -> ModelRef:
    if not timm.is_model(name.split(".")[0]):
        guess = _guess(name, "Use owner/name for the Hub, or the path of a folder.")
        raise SourceNotFoundError(f"{name!r} is neither a folder nor a name that timm knows.", guess)
    _check_tag(name)
    cfg = timm.get_pretrained_cfg(name)
    if not cfg.hf_hub_id:
        raise SourceNotFoundError(f"timm has no weights on the Hub for {name!r}.", "Choose another tag, or a folder.")
    return ModelRef(name, repo=hub.repo_info(cfg.hf_hub_id), registry_name=name)


def _check_tag(name: str) -> None:
    base, _, tag = name.partition(".")
    tags = [found.partition(".")[2] for found in timm.list_models(f"{base}.*", pretrained=True)]
    if tag and tag not in tags:
        raise SourceNotFoundError(
            f"timm's {base} has no weights tagged {tag!r}.", f"Tags: {', '.join(tags) or 'none'}."
        )


def _guess(name: str, otherwise: str) -> str:
    close = get_close_matches(name.split(".")[0], timm.list_models(), n=3)
    return f"Close names: {', '.join(close)}." if close else otherwise
