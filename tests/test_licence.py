"""Where a licence comes from, what it asks for, and when a converted model may not be published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from timm.models import get_pretrained_cfg

from tests.conftest import Run
from tests.loopback_hub import LoopbackHub
from vit2linear import convert, hub
from vit2linear.errors import PublishError, RecipeError
from vit2linear.licence import HUB_NAMES, Licence, check_push, fetch, of_source, state
from vit2linear.recipe import Recipe, override
from vit2linear.resolve import resolve
from vit2linear.sources.base import ModelRef

DINOV3 = "https://ai.meta.com/resources/models-and-libraries/dinov3-license"


def folder_with(tmp_path: Path, card: str = "", **files: str) -> ModelRef:
    """A folder source with a card's front matter and other files."""
    if card:
        (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return ModelRef(str(tmp_path), folder=tmp_path)


def of_repo(licence: Any = None, name: str | None = None, link: str | None = None, files: str = "") -> Licence:
    repo = hub.RepoInfo("lab/vit", "c0ffee", licence, name, link, tuple(files.split()))
    return of_source(ModelRef("lab/vit", repo=repo), {})


@pytest.mark.parametrize(
    ("name", "fields", "non_commercial"),
    [
        ("vit_base_patch16_224.augreg_in21k_ft_in1k", {"license": "apache-2.0"}, False),
        ("eva02_base_patch14_224.mim_in22k", {"license": "mit"}, False),
        ("vit_base_patch16_224.mae", {"license": "cc-by-nc-4.0"}, True),
        ("aimv2_1b_patch14_224.apple_pt", {"license": "apple-ascl"}, False),
        ("fastvit_mci0.apple_mclip", {"license": "apple-amlr"}, True),
        ("vit_small_patch16_dinov3_qkvb.eupe_lvd1689m", {"license": "fair-noncommercial-research-license"}, True),
        (
            "vit_small_patch16_dinov3.lvd1689m",
            {"license": "other", "license_name": "dinov3-license", "license_link": DINOV3},
            False,
        ),
        (
            "vit_base_patch16_sapiens2.fb",
            {
                "license": "other",
                "license_name": "sapiens2-license",
                "license_link": "https://github.com/facebookresearch/sapiens2",
            },
            False,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_timms_record(name: str, fields: dict[str, str], non_commercial: bool, tmp_path: Path) -> None:
    found = of_source(folder_with(tmp_path), get_pretrained_cfg(name).to_dict())
    assert found.known and found.fields == fields and found.non_commercial is non_commercial
    assert not found.no_derivatives and bool(found.notes) is non_commercial
    assert [("commercial" in warning) for warning in check_push(found.fields)] == [True] * non_commercial


@pytest.mark.parametrize("stated", [None, "unknown", ""])
def test_unknown_is_asked_for(stated: str | None, tmp_path: Path) -> None:
    found = of_source(folder_with(tmp_path), {"license": stated})
    assert not found.known and found.fields == {"license": "unknown"} and "--license" in found.notes[0]
    with pytest.raises(PublishError, match="--license NAME"):
        check_push(found.fields)
    assert check_push(state(found.fields, "Apache 2.0")) == []
    assert of_source(folder_with(tmp_path), {}, "MIT").fields == {"license": "mit"}


@pytest.mark.parametrize("given", ["", "unknown", "other"])
def test_stating_nothing(given: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="says nothing"):
        of_source(folder_with(tmp_path), {}, given)


def test_a_folders_card_wins_over_timms_record(tmp_path: Path) -> None:
    ref = folder_with(tmp_path, "license: MIT")
    assert of_source(ref, {"license": "apache-2.0"}).fields == {"license": "mit"}
    assert of_source(ref, {}, "mit").fields == {"license": "mit"}
    with pytest.raises(RecipeError, match=r"states 'mit'.*'apache-2.0' is another"):
        of_source(ref, {}, "apache-2.0")


@pytest.mark.parametrize("card", ["title: a README\nbuild: [passing", "just words", "language: en"])
def test_a_readme_that_states_none(card: str, tmp_path: Path) -> None:
    assert not of_source(folder_with(tmp_path, card), {}).known


@pytest.mark.parametrize("name", ["cc-by-nd-4.0", "cc-by-nc-nd-4.0", "my-noderivatives-terms"])
def test_no_derivatives(name: str) -> None:
    found = of_repo(name)
    assert found.no_derivatives and "push will refuse" in found.notes[0]
    with pytest.raises(PublishError, match="a converted model is one"):
        check_push(found.fields)


def test_several_licences_are_kept_together() -> None:
    assert of_repo(["mit"]).fields == {"license": "mit"}
    both = of_repo(["apache-2.0", "cc-by-nc-4.0"])
    assert both.fields == {"license": ["apache-2.0", "cc-by-nc-4.0"]} and both.non_commercial
    assert len(check_push(both.fields)) == 1


def test_a_custom_licence_keeps_name_link_and_text() -> None:
    named = of_repo("other", "Sapiens2 License", "https://example.org/terms", "LICENSE.md NOTICE config.json")
    assert named.fields["license_name"] == "sapiens2-license"
    assert named.fields["license_link"] == "https://example.org/terms"
    assert named.texts == {"LICENSE": "LICENSE.md", "NOTICE": "NOTICE"}
    # A link inside the source's repository is none in another one.
    assert of_repo("other", "x", "LICENSE.md", "LICENSE.md").fields["license_link"] == "LICENSE"
    elsewhere = of_repo("other", "x", "terms.pdf", "terms.pdf")
    assert elsewhere.fields["license_link"] == "https://huggingface.co/lab/vit/blob/c0ffee/terms.pdf"
    assert of_repo("other", "x", "TERMS.txt", "LICENSE TERMS.txt").texts == {"LICENSE": "TERMS.txt"}
    assert of_repo("x-terms").fields["license_link"] == "https://huggingface.co/lab/vit"
    assert of_repo("other").fields["license_name"] == "terms-of-the-source"
    assert not of_repo("mit", None, None, "LICENSE-IMAGES licenses.json src/LICENSE").texts


def test_a_custom_licence_without_a_text(tmp_path: Path) -> None:
    found = of_source(folder_with(tmp_path, "license: other\nlicense_name: lab-terms"), {})
    assert found.fields == {"license": "other", "license_name": "lab-terms"}
    assert "No text of the licence 'lab-terms'" in check_push(found.fields)[0]
    stated = of_source(folder_with(tmp_path / "..", LICENSE="terms"), {}, "house-rules")
    assert stated.fields == {"license": "other", "license_name": "house-rules", "license_link": "LICENSE"}
    assert "none of the Hub's names" in stated.notes[0]


def test_what_lies_beside_a_single_file_is_not_its_own(tmp_path: Path) -> None:
    folder_with(tmp_path, LICENSE="of something else")
    lone = ModelRef("vit.pth", folder=tmp_path, weights_name="vit.pth")
    assert not of_source(lone, {}).texts
    folder_with(tmp_path, "license: mit")
    assert fetch(lone, of_source(lone, {})) == {"LICENSE": b"of something else"}


def test_every_name_of_the_hub_is_kept_as_it_is() -> None:
    for name in HUB_NAMES:
        assert of_repo(name).fields == {"license": name}


def test_convert_carries_the_licence(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in checkpoint.iterdir():
        if path.name != "README.md":
            (source / path.name).write_bytes(path.read_bytes())
    folder_with(source, "license: other\nlicense_name: lab-nc-terms\nlicense_link: LICENSE.md", LICENSE__md="no sale")
    options = {"source__model": str(source), "data__path": str(class_folders), "output__dir": str(tmp_path / "out")}
    options |= {"distill__steps": 0, "distill__calibration__images": 0, "data__workers": 0, "run__device": "cpu"}
    record = convert(override(Recipe(), **options)).report["source"]
    assert (record["license"], record["license_name"], record["license_link"]) == ("other", "lab-nc-terms", "LICENSE")
    assert record["gated"] is False and len(check_push(record)) == 1
    assert (tmp_path / "out" / "LICENSE").read_text() == "no sale"
    assert "[lab-nc-terms](LICENSE)" in (tmp_path / "out" / "README.md").read_text()


def test_the_dry_run_warns(checkpoint: Path, tmp_path: Path, cli: Run) -> None:
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    folder_with(tmp_path, "license: cc-by-nc-nd-4.0")
    told = " ".join(cli("convert", tmp_path, "--dry-run", "--output", "out").stderr.split())
    assert "push will refuse" in told and "allows no commercial use" in told
    refused = cli("convert", tmp_path, "--dry-run", "--output", "out", "--license", "mit", code=2)
    assert "the source states 'cc-by-nc-nd-4.0'" in " ".join(refused.stderr.split())


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A Hub that this process's client takes for the real one; the client has read its environment long ago."""
    with LoopbackHub() as found:
        template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", found.token)
        yield found
        close_session()


def test_on_the_hub(loopback: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated repository and a custom licence; then the same from the cache alone."""
    card = b"---\nlicense: other\nlicense_name: lab-terms\nlicense_link: LICENSE\n---\n"
    loopback.add_repo("lab/gated", {"README.md": card, "LICENSE": b"terms"}, gated=True)
    loopback.add_repo("lab/open", {"README.md": card, "LICENSE": b"terms"})
    fields = {"license": "other", "license_name": "lab-terms", "license_link": "LICENSE"}
    gated, public = resolve("lab/gated"), resolve("lab/open")
    assert gated.repo is not None and gated.repo.gated is True and of_source(gated, {}).fields == fields
    assert public.repo is not None and public.repo.gated is False
    found = of_source(public, {})
    assert found.fields == fields and not [r for r in loopback.requests if "/resolve/" in r.path], "nothing is fetched"
    assert fetch(public, found) == {"LICENSE": b"terms"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    close_session()
    asked = len(loopback.requests)
    again = resolve("lab/open")
    assert again.repo is not None and again.repo.gated is None, "nobody knows"
    assert of_source(again, {}).fields == fields and fetch(again, found) == {"LICENSE": b"terms"}
    assert len(loopback.requests) == asked


def test_the_demo_states_its_licence() -> None:
    found = resolve("demo")
    assert of_source(found, {"license": "apache-2.0"}).texts == {}
