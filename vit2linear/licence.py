"""The licence of converted weights: that of their source, read and inherited, never a default.

What the record of a conversion says (``license``, ``license_name``, ``license_link``) is all that is needed later, so
``state`` and ``check_push`` work on it alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from vit2linear.errors import PublishError, RecipeError
from vit2linear.sources.base import ModelRef

HUB_NAMES = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
    fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma
    """.split()  # noqa: SIM905
)
"""What the Hub takes as ``license`` (huggingface.co/docs/hub/repositories-licenses); for others it wants ``other``."""

LINKS = {
    "dinov3-license": "https://ai.meta.com/resources/models-and-libraries/dinov3-license",
    "nvidia-open-model-license": "https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license/",
}
"""Where the text of a licence is that timm names without a link."""

LICENSE, NOTICE = "LICENSE", "NOTICE"
_FILES = {
    LICENSE: re.compile(r"((model[-_])?licen[cs]e|copying)(\.(md|txt|rst))?", re.IGNORECASE),
    NOTICE: re.compile(r"notice(\.(md|txt|rst))?", re.IGNORECASE),
}
_NON_COMMERCIAL = re.compile(r"(^|-)nc(-|$)|non-?commercial|research|^apple-amlr$|^deepfloyd-if-license$")
_NO_DERIVATIVES = re.compile(r"(^|-)nd(-|$)|no-?deriv")


@dataclass(frozen=True)
class Licence:
    """What the card says of a source's licence, and what goes with it."""

    fields: dict[str, Any]
    """Of the card's front matter: ``license``, and for others than the Hub's ``license_name`` and ``license_link``."""
    texts: dict[str, str]
    """Files of the artifact, ``LICENSE`` and ``NOTICE``, to the files of the source that they are copies of."""
    notes: tuple[str, ...]
    """What the user should know before converting."""

    @property
    def known(self) -> bool:
        """Whether anything states one."""
        return bool(names(self.fields))

    @property
    def non_commercial(self) -> bool:
        """Whether it allows no commercial use."""
        return _any(_NON_COMMERCIAL, self.fields)

    @property
    def no_derivatives(self) -> bool:
        """Whether it allows no derivatives, such as a converted model, to be shared."""
        return _any(_NO_DERIVATIVES, self.fields)


def of_source(ref: ModelRef, pretrained_cfg: dict[str, Any], given: str | None = None) -> Licence:
    """The licence of a source: its card's, else timm's record, else what the user states.

    Args:
        ref: the source; of a repository nothing is fetched but, where the Hub cannot be asked, its card.
        pretrained_cfg: timm's description of it.
        given: ``--license``.

    Raises:
        RecipeError: ``given`` is no licence, or not the one that the source states.
    """
    card = _card(ref)
    link = str(card.get("license_link") or "")
    texts = (
        _texts(ref, link) if ref.weights_name is None or card else {}
    )  # what lies beside one file may not be its own
    stated = _named(card.get("license"), card.get("license_name"))
    if not names(stated):
        stated = _named(pretrained_cfg.get("license"))
    fields = stated if given is None else state(stated, given)
    if names(fields) and (fields["license"] == "other" or link):
        where = _link(link, ref, texts) or LINKS.get(fields.get("license_name", ""))
        where = where or (LICENSE if LICENSE in texts else _page(ref) or pretrained_cfg.get("origin_url"))
        fields |= {"license_link": where} if where else {}
    return Licence(fields, texts, tuple(_notes(fields, given, texts.get(LICENSE))))


def fetch(ref: ModelRef, licence: Licence) -> dict[str, bytes]:
    """The contents of ``texts``, from the Hub if need be."""
    if "README.md" in ref.filenames:
        ref.file("README.md")  # into the cache, so that a run without the Hub finds the licence again
    paths = {file: ref.file(name) for file, name in licence.texts.items()}
    return {file: path.read_bytes() for file, path in paths.items() if path is not None}


def state(fields: dict[str, Any], given: str) -> dict[str, Any]:
    """The record of a licence after the user stated one.

    Args:
        fields: the record of a source.
        given: ``--license``.

    Raises:
        RecipeError: ``given`` is no licence, or not the one that the source states.
    """
    own, said = names(fields), _normal(given)
    if said in ("", "unknown", "other"):
        raise RecipeError(f"--license: {given!r} says nothing.", "Give the licence's name, such as apache-2.0.")
    if not own:
        return _named(said)
    if own != [said]:
        raise RecipeError(
            f"--license: the source states {words(fields)!r}, and converted weights keep it; {given!r} is another.",
            "Leave --license out; where the source is wrong about itself, correct its card.",
        )
    return {k: fields[k] for k in ("license", "license_name", "license_link") if k in fields}


def check_push(fields: dict[str, Any]) -> list[str]:
    """Whether weights may be published at all, by the record of their source.

    Args:
        fields: ``source`` of ``report.json``.

    Returns:
        Warnings.

    Raises:
        PublishError: the licence is not known, or allows no derivatives.
    """
    if not names(fields):
        raise PublishError(
            "the source states no licence, and without one nobody may use the weights.",
            "Find out what its authors allow, then state it: --license NAME, such as apache-2.0.",
        )
    if _any(_NO_DERIVATIVES, fields):
        raise PublishError(
            f"the source's licence, {words(fields)}, lets nobody share derivatives, and a converted model is one.",
            "Keep it to yourself (eval, bench and export work without push), or ask the authors for other terms.",
        )
    warnings = [_NO_SALE.format(words(fields))] if _any(_NON_COMMERCIAL, fields) else []
    if fields["license"] == "other" and not fields.get("license_link"):
        warnings.append(
            f"No text of the licence {words(fields)!r} was found at the source: say on the card where it is."
        )
    return warnings


def names(fields: dict[str, Any]) -> list[str]:
    """The licences in a record, mostly one; none if unknown."""
    licence = fields.get("license_name") if fields.get("license") == "other" else fields.get("license")
    found = licence if isinstance(licence, list) else [licence]
    return [name for name in map(_normal, found) if name not in ("", "unknown")]


def words(fields: dict[str, Any]) -> str:
    """The licence in a record by name."""
    return " and ".join(names(fields)) or "unknown"


_NO_SALE = "The source's licence, {}, allows no commercial use, and the converted weights keep it."


def _any(kind: re.Pattern[str], fields: dict[str, Any]) -> bool:
    return any(kind.search(name) for name in names(fields))


def _notes(fields: dict[str, Any], given: str | None, text: str | None) -> list[str]:
    if not names(fields):
        hint = f" (the source has a file {text})" if text else ""
        return [f"The source states no licence: the card says 'unknown', and push will ask. Use --license{hint}."]
    notes = []
    if _any(_NO_DERIVATIVES, fields):
        notes.append(f"The source's licence, {words(fields)}, lets nobody share derivatives: push will refuse.")
    if _any(_NON_COMMERCIAL, fields):
        notes.append(_NO_SALE.format(words(fields)))
    if given is not None and fields["license"] == "other":
        notes.append(f"{words(fields)!r} is none of the Hub's names of licences: the card says 'other' with that name.")
    return notes


def _card(ref: ModelRef) -> dict[str, Any]:
    """The licence's entries of the source's model card."""
    keys = ("license", "license_name", "license_link")
    if ref.repo is not None and ref.repo.license:
        return {key: getattr(ref.repo, key) for key in keys}
    path = ref.file("README.md") if "README.md" in ref.filenames else None
    try:
        found = metadata_load(path) if path is not None else None
    except Exception:  # a README of something else: errors of the YAML parser, whose package is not ours to name
        return {}
    return {key: found[key] for key in keys if key in found} if found else {}


def _texts(ref: ModelRef, link: str) -> dict[str, str]:
    """Where the licence's text and notices are among the source's files; what the card links to comes first."""
    texts: dict[str, str] = {}
    for file, pattern in _FILES.items():
        found = [name for name in ref.filenames if pattern.fullmatch(name)]
        texts |= {file: found[0]} if found else {}
    is_text = Path(link).suffix.lower() in ("", ".md", ".txt", ".rst")
    return {**texts, LICENSE: link} if link in ref.filenames and is_text else texts


def _named(licence: Any, name: Any = None) -> dict[str, Any]:
    """Front matter for a licence that is called so somewhere; a list of them is kept."""
    found = [_normal(entry) for entry in (licence if isinstance(licence, list) else [licence])]
    if found == ["other"]:
        return {"license": "other", "license_name": _normal(name) or "terms-of-the-source"}
    if not found or set(found) <= {"", "unknown"}:
        return {"license": "unknown"}
    if set(found) <= HUB_NAMES:
        return {"license": found[0] if len(found) == 1 else found}
    return {"license": "other", "license_name": "-and-".join(found)}


def _normal(name: Any) -> str:
    """As the Hub writes names: ``Apache-2.0`` and ``Apache 2.0`` are ``apache-2.0``."""
    return "-".join(str(name or "").lower().split())


def _link(link: str, ref: ModelRef, texts: dict[str, str]) -> str | None:
    """A card's link, where it is read from another repository."""
    if not link or "://" in link:
        return link or None
    if texts.get(LICENSE) == link:
        return LICENSE
    return f"{_page(ref)}/blob/{ref.repo.commit}/{link}" if ref.repo is not None else None


def _page(ref: ModelRef) -> str | None:
    return f"https://huggingface.co/{ref.repo.repo}" if ref.repo is not None else None
