"""``push`` at a Hub on loopback, in this process: what is uploaded, what stays, and what is said when it fails."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import close_session
from safetensors.torch import load_file, save_file

from tests.conftest import Run
from tests.loopback_hub import OWNER, LoopbackHub
from vit2linear import Recipe, convert, load
from vit2linear.artifact import REQUIRED, digest
from vit2linear.recipe import Calibration, override

# The client's own, where it sends large files to a storage.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO, ELSEWHERE = f"{OWNER}/tiny", "big-lab/tiny"


@pytest.fixture(scope="module")
def converted(checkpoint: Path, class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a source under the MIT licence."""
    folder = tmp_path_factory.mktemp("converted")
    shutil.copytree(checkpoint, folder / "source")
    (folder / "source" / "README.md").write_text("---\nlicense: mit\n---\n")
    request = override(
        Recipe(),
        source__model=str(folder / "source"),
        distill__steps=0,
        distill__calibration=Calibration(images=0),
        data__path=str(class_folders),
        data__workers=0,
        output__dir=str(folder / "tiny"),
        run__device="cpu",
    )
    convert(request)
    return folder / "tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A Hub that this process's client takes for the real one; the client has read its environment long ago."""
    with LoopbackHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub
        close_session()


@pytest.fixture
def tiny(converted: Path, cli: Run) -> Path:
    """A copy of the artifact in the current folder."""
    return Path(shutil.copytree(converted, "tiny"))


def edit_report(folder: Path, **source: object) -> None:
    report = json.loads((folder / "report.json").read_text())
    report["source"] |= source
    (folder / "report.json").write_text(json.dumps(report))


def uploaded(hub: LoopbackHub, revision: str = "main") -> dict[str, bytes]:
    files = hub.files(REPO, revision=revision)
    files.pop(".gitattributes", None)
    return files


def local(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(cli: Run, *args: object, code: int = 8) -> str:
    """The message of a push that fails; whatever it was, it is one line, and the last."""
    done = cli("push", *args, code=code)
    assert not done.stdout
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.rstrip().endswith(message)
    return message


@pytest.mark.parametrize("lfs", [False, True])
def test_what_is_uploaded(hub: LoopbackHub, tiny: Path, cli: Run, monkeypatch: pytest.MonkeyPatch, lfs: bool) -> None:
    hub.lfs = lfs
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", lfs)
    expected = local(tiny)
    (tiny / "notes.txt").write_text("not for others")
    done = json.loads(cli("push", "--private", "--json").stdout)
    assert (done["repo"], done["private"], done["changed"]) == (REPO, True, True)
    assert done["commit"] == hub.commit(REPO) and hub.repo(REPO).private
    assert uploaded(hub) == expected and set(REQUIRED) <= expected.keys()
    assert not hub.leaks and any(r.method == "PUT" for r in hub.requests) == lfs
    again = cli("push", "tiny", REPO)
    assert "Everything was there already" in again.stderr and hub.commit(REPO) == done["commit"]


def test_the_report_holds_the_digest_of_every_other_file(converted: Path) -> None:
    recorded = json.loads((converted / "report.json").read_text())["files"]
    assert recorded == {p.name: digest(p.read_bytes()) for p in converted.iterdir() if p.name != "report.json"}


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_files_that_are_not_those_that_were_evaluated(hub: LoopbackHub, tiny: Path, cli: Run, file: str) -> None:
    if file == "config.json":
        (tiny / file).write_text((tiny / file).read_text().replace("relu", "elu"))
    else:
        weights = {name: value + 1 for name, value in load_file(tiny / file).items()}
        save_file(weights, tiny / file, metadata={"format": "pt"})
    assert "not the file that was evaluated" in refused(cli, code=7)
    (tiny / file).write_bytes((tiny / file).read_bytes()[:-7])
    assert "cut short" in refused(cli, "tiny", "--dry-run", code=7) or file == "config.json"
    report = json.loads((tiny / "report.json").read_text())
    del report["files"]  # as before there were digests
    (tiny / "report.json").write_text(json.dumps(report))
    assert refused(cli, code=7)
    (tiny / file).unlink()
    assert refused(cli, "tiny", code=7)
    assert not hub.requests


def test_dry_run_asks_nobody(hub: LoopbackHub, tiny: Path, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = local(tiny)
    shown = json.loads(cli("push", "tiny", REPO, "--dry-run", "--json", "--revision", "next").stdout)
    assert shown["files"] == {name: len(data) for name, data in before.items()}
    assert shown["licence"] == {"license": "mit"} and shown["visibility"] == "the account's default"
    assert shown["target"] == {"repo": REPO, "revision": "next", "pull_request": False}
    monkeypatch.delenv("HF_TOKEN")
    said = cli("push", "--dry-run", "--private")
    assert "model.safetensors" in said.stdout and "a new one is private" in said.stderr and "mit" in said.stderr
    assert not hub.requests and local(tiny) == before


def test_branches_and_pull_requests(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    first = cli("push", "tiny", REPO, "--revision", "next", "--commit-message", "Try it")
    assert first.stdout.strip() == f"{hub.url}/{REPO}/tree/next"
    assert uploaded(hub, "next") == local(tiny) and not uploaded(hub) and hub.repo(REPO).messages == ["Try it"]
    cli("push", "tiny", REPO, "--revision", "next")
    proposed = cli("push", "tiny", REPO, "--create-pr")
    assert proposed.stdout.strip() == f"{hub.url}/{REPO}/discussions/1"
    assert uploaded(hub, "refs/pr/1") == local(tiny) and not uploaded(hub)
    (tiny / "README.md").write_text("---\nlicense: mit\n---\nBetter\n")
    cli("push", "tiny", REPO, "--revision", "refs/pr/1")
    assert uploaded(hub, "refs/pr/1") == local(tiny)
    assert "has no 'refs/pr/7'" in refused(cli, "tiny", REPO, "--revision", "refs/pr/7")
    hub.add_repo(ELSEWHERE, {".gitattributes": b""})
    cli("push", "tiny", ELSEWHERE, "--create-pr")
    assert hub.files(ELSEWHERE, revision="refs/pr/1").keys() > local(tiny).keys()


def test_what_an_earlier_upload_left(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    report = json.loads((tiny / "report.json").read_text())
    report["files"] |= {"old-plot.png": "", "old.safetensors": "", ".gitattributes": ""}
    earlier = {
        "report.json": json.dumps(report).encode(),
        "metrics.jsonl": b"{}\n",
        "README.md": (tiny / "README.md").read_bytes(),
    }
    ours = {**earlier, "old-plot.png": b"\x89PNG", "old.safetensors": b"\0"}
    theirs = {".gitattributes": b"", "thesis.pdf": b"%PDF", "samples/a.png": b"\x89PNG"}
    hub.add_repo(REPO, {**ours, **theirs})
    done = cli("push", "tiny", REPO)
    assert "Removed, of an earlier upload: metrics.jsonl, old-plot.png, old.safetensors" in done.stderr
    assert hub.files(REPO) == {**theirs, **local(tiny)}
    assert len(hub.repo(REPO).messages) == 1, "all in one commit"


def test_a_card_that_a_person_edited(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    cli("push", "tiny", REPO)
    edited = {**hub.files(REPO), "README.md": b"---\nlicense: mit\n---\n# By hand\n"}
    hub.add_repo(REPO, edited)
    (tiny / "recipe.toml").write_text("# another upload\n" + (tiny / "recipe.toml").read_text())
    kept = cli("push", "tiny", REPO)
    assert "edited by hand" in kept.stderr and "--overwrite-card" in kept.stderr
    assert uploaded(hub) == {**local(tiny), "README.md": edited["README.md"]}
    cli("push", "tiny", REPO, "--overwrite-card")
    assert uploaded(hub) == local(tiny)


def test_a_card_edited_in_the_folder_is_uploaded(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    cli("push", "tiny", REPO)
    (tiny / "README.md").write_text((tiny / "README.md").read_text() + "\nA word of mine.\n")
    assert "edited" not in cli("push", "tiny", REPO).stderr
    assert uploaded(hub) == local(tiny)


def test_licence_that_the_source_does_not_state(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    edit_report(tiny, license="other", license_name="unknown")
    assert "states no licence" in refused(cli, "tiny", REPO)
    assert not hub.requests
    cli("push", "tiny", REPO, "--license", "apache-2.0")
    source = json.loads(uploaded(hub)["report.json"])["source"]
    assert source["license"] == "apache-2.0" and "license_name" not in source
    assert b"license: apache-2.0" in uploaded(hub)["README.md"]
    assert b"That of the original, apache-2.0." in uploaded(hub)["README.md"]
    assert "Everything was there already" in cli("push", "tiny", REPO).stderr, "the folder remembers"
    assert "weights keep it" in refused(cli, "tiny", REPO, "--license", "mit", code=2)


def test_licences_that_forbid_something(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    edit_report(tiny, license="cc-by-nc-nd-4.0")
    assert "a converted model is one" in refused(cli, "tiny", REPO) and not hub.requests
    edit_report(tiny, license="cc-by-nc-4.0")
    assert "allows no commercial use" in cli("push", "tiny", REPO).stderr


def test_a_licence_of_ones_own(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    edit_report(tiny, license="unknown")
    (tiny / "LICENSE").write_text("terms")
    (tiny / "README.md").write_text("---\nlicense: unknown\n---\nMy words\n")
    assert "No text" not in cli("push", "tiny", REPO, "--license", "Lab terms").stderr
    found = uploaded(hub)
    assert found["LICENSE"] == b"terms" and found["README.md"].endswith(b"My words\n")
    for line in (b"license: other", b"license_name: lab-terms", b"license_link: LICENSE"):
        assert line in found["README.md"]


@pytest.mark.parametrize(("gated", "told"), [(True, "is gated"), (None, "may be gated")])
def test_a_gated_source(hub: LoopbackHub, tiny: Path, cli: Run, gated: bool | None, told: str) -> None:
    edit_report(tiny, gated=gated)
    assert told in cli("push", "tiny", REPO, "--dry-run").stderr
    assert json.loads(cli("push", "tiny", REPO, "--json").stdout)["private"] is True


def test_visibility(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    edit_report(tiny, gated=True)
    assert "is gated" in cli("push", "tiny", REPO).stderr
    assert hub.repo(REPO).private
    assert "stays private" in cli("push", "tiny", REPO, "--public").stderr
    cli("push", "tiny", f"{OWNER}/open", "--public")
    assert not hub.repo(f"{OWNER}/open").private
    assert "exists and is public" in refused(cli, "tiny", f"{OWNER}/open", "--private")
    assert "exists and is public" in refused(cli, "tiny", f"{OWNER}/open")


COMMIT = f"/api/models/{REPO}/commit/main"
Prepare = Callable[[LoopbackHub, pytest.MonkeyPatch], object]
FAILURES: dict[str, tuple[Prepare, str]] = {
    "not logged in": (
        lambda h, m: m.delenv("HF_TOKEN"),
        "not logged in to the Hub. Run 'hf auth login' or set HF_TOKEN",
    ),
    "bad token": (lambda h, m: m.setenv("HF_TOKEN", "hf_wrong"), "token is not valid"),
    "no permission": (
        lambda h, m: (h.add_repo(REPO, {}), m.setenv("HF_TOKEN", h.read_token)),
        "no permission to write",
    ),
    "gated": (
        lambda h, m: h.add_repo(REPO, {"report.json": b"{}"}, gated=True),
        "is gated and this account has no access",
    ),
    "rate": (lambda h, m: h.fail("POST", "/create", [429], Retry_After="600"), "Wait 10 minutes. To go on"),
    "rate in seconds": (lambda h, m: h.fail("GET", REPO, [429], RateLimit='"api";r=0;t=55'), "Wait 55 s."),
    "offline": (lambda h, m: m.setattr(constants, "HF_HUB_OFFLINE", True), "offline mode forbids uploading"),
    "unreachable": (
        lambda h, m: m.setattr(constants, "ENDPOINT", "http://127.0.0.1:9"),
        "127.0.0.1:9 cannot be reached",
    ),
    "taken": (lambda h, m: h.add_repo(REPO, {"config.json": b"{}"}), "is taken: it holds a model"),
    "card": (
        lambda h, m: h.card_errors.append('"license" must be one of [mit]'),
        '"license" must be one of [mit]. Correct',
    ),
    "conflict": (lambda h, m: h.when("POST", COMMIT, lambda: h.add_repo(REPO, {"a": b""})), "somebody committed to"),
    "trouble": (lambda h, m: h.fail("POST", COMMIT, [503]), "trouble of its own (503)"),
    "cut": (lambda h, m: h.when("POST", COMMIT, lambda: h.line.cut(0)), "was cut; nothing is half-uploaded"),
    "no Hub": (lambda h, m: h.fail("POST", "/create", [200], body=b"<html>"), "answers, but not as the Hub does"),
    "refused": (lambda h, m: h.fail("POST", COMMIT, [409]), "refused (409): injected failure"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_failures(hub: LoopbackHub, tiny: Path, cli: Run, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    prepare, told = FAILURES[case]
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own tries
    with monkeypatch.context() as patch:
        prepare(hub, patch)
        message = refused(cli, "tiny", REPO, "--commit-message", "It's mine")
    assert told in message
    assert hub.token not in message
    if case != "taken":
        assert message.endswith(f"""vit2linear push tiny {REPO} --commit-message 'It'"'"'s mine'""")
        hub.card_errors.clear()
        hub.line.mend()
        if case == "gated":
            hub.repo(REPO).gated = False
        cli("push", "tiny", REPO)
        assert local(tiny).items() <= hub.files(REPO).items()


def test_names(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    assert "is no name for a repository" in refused(cli, "tiny", "a//b")
    assert "is no name for a repository" in refused(cli, "tiny", "no spaces", "--dry-run")
    assert "'big-lab' is another account" in refused(cli, "tiny", ELSEWHERE)
    assert "there is no folder 'me/tiny'" in refused(cli, "me/tiny", code=7)
    cli("push", "tiny", "other-name")
    assert hub.files(f"{OWNER}/other-name")


def test_no_xet(hub: LoopbackHub, tiny: Path, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.lfs = True
    assert "has no Xet storage. Set HF_HUB_DISABLE_XET=1." in refused(cli, "tiny", REPO)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.fail("PUT", ".", [403])
    cli("push", "tiny", REPO)
    assert uploaded(hub) == local(tiny)


def test_a_token_on_the_command_line(hub: LoopbackHub, tiny: Path, cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    hub.fail("POST", COMMIT, [500])
    message = refused(cli, "tiny", REPO, "--token", hub.token)
    assert "with the token in HF_TOKEN: vit2linear push tiny" in message and hub.token not in message
    done = cli("push", "tiny", REPO, "--token", hub.token)
    assert hub.token not in done.stdout + done.stderr
    assert not [p for p in Path().rglob("*") if p.is_file() and hub.token.encode() in p.read_bytes()]


def test_a_download_that_is_cut_goes_on(
    hub: LoopbackHub, tiny: Path, cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.lfs = True
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    cli("push", "tiny", REPO)
    hub.line.cut_answer("^/[0-9a-f]{64}$", 100_000)
    pixels = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load(REPO)(pixels), load("tiny")(pixels))
    assert [r.method for r in hub.requests if r.path.startswith(hub.storage.url)].count("GET") == 2
    assert not hub.leaks


def test_after_an_upload_by_other_means(hub: LoopbackHub, tiny: Path, cli: Run) -> None:
    api = HfApi()
    api.create_repo(REPO)
    api.upload_folder(repo_id=REPO, folder_path=tiny, create_pr=True)
    assert uploaded(hub, "refs/pr/1") == local(tiny)
    assert "Everything was there already" in cli("push", "tiny", REPO, "--revision", "refs/pr/1").stderr


@pytest.mark.slow
@pytest.mark.parametrize("lfs", [False, True], ids=["in the commit", "through the storage"])
def test_cut_at_any_byte(
    hub: LoopbackHub,
    tiny: Path,
    cli: Run,
    monkeypatch: pytest.MonkeyPatch,
    lfs: bool,
    record_property: Callable[..., None],
) -> None:
    """The line breaks after so many bytes and stays broken; the same command, once it is mended, does the rest."""
    hub.lfs = lfs
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", lfs)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the client's own tries
    before = hub.line.received
    cli("push", "tiny", f"{OWNER}/whole")
    size = hub.line.received - before
    assert size > (tiny / "model.safetensors").stat().st_size
    hub.storage.contents.clear()
    places = [*sorted(random.Random(7).sample(range(1, size), 19)), size]
    record_property("cut after", places)
    for place in places:
        repo = f"{OWNER}/cut-{place}"
        hub.line.cut(place)
        message = refused(cli, "tiny", repo)
        hub.line.mend()
        assert "was cut" in message or "cannot be reached" in message, f"after {place} of {size} bytes: {message}"
        (command,) = re.findall(r"To go on: vit2linear (.*)$", message)
        cli(*command.split())
        assert local(tiny).items() <= hub.files(repo).items(), f"after {place} of {size} bytes"
        assert len(hub.repo(repo).messages) == 1, "one commit, whenever the line broke"
        hub.storage.contents.clear()
    assert not hub.leaks
