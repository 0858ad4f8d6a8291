"""The promised commands, typed as a user types them, against a Hub on loopback with tiny stand-ins for the real files.

What is checked here can only be seen from outside: what is fetched, what is uploaded, and what other programs can load.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys

import pytest

from tests.hub_user import CLASSES, DATA, SOURCE, SPLITS, User
from tests.loopback_hub import OWNER

NAME = "vit-base-patch16-224-relu"
ROUNDING = pytest.approx(0, abs=1e-6)
LOAD = """
import json, sys
import timm, vit2linear
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

pushed, local = sys.argv[1:]
image = Image.effect_noise((50, 40), 80).convert("RGB")
pixels = AutoImageProcessor.from_pretrained(pushed)(image, return_tensors="pt")["pixel_values"]
models = [timm.create_model(name, pretrained=True).eval() for name in (f"hf-hub:{pushed}", f"local-dir:{local}")]
wrapped = AutoModelForImageClassification.from_pretrained(pushed).eval()
with torch.inference_mode():
    remote, kept, ours = (model(pixels) for model in (*models, vit2linear.load(pushed)))
    seen = wrapped(pixel_values=pixels).logits
scores = [a["score"] for a in pipeline("image-classification", model=pushed, device="cpu")(image, top_k=3)]
found = {"timm": remote[0], "vit2linear": ours[0], "transformers": seen[0]}
differences = {name: (logits - kept[0]).abs().max().item() for name, logits in found.items()}
differences["pipeline"] = (torch.tensor(scores) - kept[0].softmax(0).topk(3).values).abs().max().item()
operators = sorted({type(m).__module__ for m in models[0].modules() if ".ops." in type(m).__module__})
print(json.dumps({"operators": operators, "classes": kept.shape[1], "differences": differences}))
"""


def test_convert_eval_push_and_load(user: User, source_files: dict[str, bytes]) -> None:
    hub, artifact, repo = user.hub, user.folder / NAME, f"{OWNER}/{NAME}"
    converted = user.run(f"vit2linear convert {SOURCE} --op relu --distill-steps 4")
    (announced,) = [line for line in converted.stderr.splitlines() if "No --data given" in line]
    assert DATA in announced
    assert re.search(r"\d GB", announced)
    assert [path.name for path in user.folder.iterdir()] == [NAME]
    report = json.loads((artifact / "report.json").read_text())
    assert report["source"]["repo"] == SOURCE
    assert report["source"]["commit"] == hub.commit(SOURCE)
    assert report["source"]["license"] == "apache-2.0"
    assert {stage["stage"] for stage in report["stages"]} == {"attention", "feature"}
    assert sum(stage["steps"] for stage in report["stages"]) == 4

    # From here on main is another model: eval must go on with the commit that was converted.
    hub.add_repo(SOURCE, {**source_files, "config.json": b'{"model_type": "bert"}'})
    shown = user.run("vit2linear eval").stdout
    assert f"{DATA} (test), {SPLITS['test']} images" in " ".join(shown.split())
    assert "top-1" in shown
    measured = json.loads(user.run("vit2linear eval --json").stdout)
    assert (measured["data"], measured["images"]) == (f"{DATA} (test)", SPLITS["test"])
    for model in ("teacher", "student"):
        assert measured[model]["top1"] == pytest.approx(100 / len(CLASSES))
        assert report["evaluation"][model]["top1"] == pytest.approx(100 / len(CLASSES))

    (artifact / "notes.txt").write_text("not for others")
    assert "not logged in" in one_line(user.run("vit2linear push", code=8, HF_TOKEN=None))
    hub.lfs = True
    assert f"{hub.url}/{repo}" in user.run("vit2linear push", HF_HUB_DISABLE_XET="1").stdout
    uploaded = hub.files(repo)
    uploaded.pop(".gitattributes")  # the Hub's own, in every new repository
    assert sorted([*uploaded, "notes.txt"]) == sorted(path.name for path in artifact.iterdir())
    assert all(data == (artifact / name).read_bytes() for name, data in uploaded.items())

    # Anybody, elsewhere.
    strangers_cache = str(user.home / "stranger")
    loaded = user.execute([sys.executable, "-c", LOAD, repo, NAME], HF_TOKEN=None, HF_HOME=strangers_cache)
    seen = json.loads(loaded.stdout)
    assert (seen["operators"], seen["classes"]) == (["vit2linear.ops.relu"], 1000)
    # transformers lays the weights elsewhere in memory, which changes how a matrix product is summed.
    assert seen["differences"] == {"timm": 0, "vit2linear": 0, **dict.fromkeys(("transformers", "pipeline"), ROUNDING)}

    assert {r.method for r in hub.requests if r.path.startswith(hub.storage.url)} == {"PUT", "GET"}
    assert not user.leaks(), "the storage is told no token"
    assert not user.elsewhere()
    written = [path for path in user.home.rglob("*") if path.is_file()]
    assert not [path for path in written if hub.token.encode() in path.read_bytes()]


def test_dry_run_reads_no_weights(user: User) -> None:
    done = user.run(f"vit2linear convert {SOURCE} --op relu --distill-steps 4 --dry-run")
    assert user.fetched(SOURCE) == {"config.json", "preprocessor_config.json"}
    assert not user.fetched(DATA)
    assert {request.method for request in user.hub.requests} <= {"GET", "HEAD"}
    assert user.hub.commit(SOURCE)[:12] in done.stderr
    assert not list(user.folder.iterdir())
    assert not user.elsewhere()


@pytest.mark.parametrize(
    ("repo", "told"),
    [
        ("big-lab/gated-vit", "is gated"),
        ("google/vit-base-patch16-242", "no repository"),
        ("google/vit-base-patch16-224", "cannot be reached"),
    ],
    ids=["gated", "absent", "unreachable"],
)
def test_source_out_of_reach(user: User, source_files: dict[str, bytes], repo: str, told: str) -> None:
    user.hub.add_repo("big-lab/gated-vit", source_files, gated=True)
    endpoint = user.hub.url if told != "cannot be reached" else f"http://127.0.0.1:{unused_port()}"
    message = one_line(user.run(f"vit2linear convert {repo} --op relu", code=3, HF_ENDPOINT=endpoint))
    assert told in message
    assert repo in message
    assert not list(user.folder.iterdir())
    assert not user.elsewhere()


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that failed: the last line, the only one of its kind, and nothing on stdout."""
    assert not done.stdout
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.rstrip().endswith(message)
    return message


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
