"""The report's page: whole, self-contained, and at home in a browser at every width."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit2linear import Recipe, convert, record
from vit2linear.artifact import PAGE
from vit2linear.recipe import override

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
QUIET = [
    f"--{flag}"
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "hide-scrollbars", "enable-logging=stderr", "v=0"),
    )
]


class Reader(HTMLParser):
    """Tags in order, and whether they close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(checkpoint: Path, class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a conversion that was trained, with everything on it."""
    output = tmp_path_factory.mktemp("page") / "<converted> & 'quoted'"
    request = {"source__model": str(checkpoint), "data__path": str(class_folders), "output__dir": str(output)}
    small = {"distill__steps": 4, "distill__batch_size": 4, "data__workers": 0, "run__device": "cpu"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(record, "LOOKED_AT", 12)
        convert(override(Recipe(), **request, **small))
    return output / PAGE


def test_it_is_one_file_that_asks_nobody(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(text) < 3_000_000 and "<script" not in text
    reader = Reader()
    reader.feed(text)
    assert not reader.open and "url(" not in text and "@import" not in text
    fetched = [attrs[key] or "" for _, attrs in reader.seen for key in ("src", "href") if key in attrs]
    assert len(fetched) > 10 and all(address.startswith(("data:", "#")) for address in fetched)
    images = [attrs for tag, attrs in reader.seen if tag == "img"]
    assert len(images) >= 5 and all(i["alt"] and (i["src"] or "").startswith("data:image/png;base64,") for i in images)
    ids = {attrs.get("id") for _, attrs in reader.seen}
    targets = {(a["href"] or "")[1:] for tag, a in reader.seen if tag == "a"}
    assert targets <= ids and {"results", "training", "routing", "images", "record"} <= targets
    assert "&lt;converted&gt; &amp;" in text, "names are text"


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 900, 1600])
def test_in_a_browser(page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    """No message on the console, nothing beyond the window's right edge, and something in every part of it."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    # Chromium's smallest window is wider than 400 px, so the page is put into a frame of that width.
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<body style='margin:0'><iframe id=f style='border:0;width:{width}px;height:3000px' src='page.html'></iframe>"
        "<script>f.onload=()=>{const d=f.contentDocument.documentElement;"
        "document.title=`${d.scrollWidth} ${d.clientWidth} ${d.scrollHeight}`}</script>"
    )
    shutil.copy(page, tmp_path / "page.html")
    shot = tmp_path / "shot.png"
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 900)},3000"]
    command += ["--allow-file-access-from-files", *(["--force-dark-mode"] if dark else [])]
    for more in (["--dump-dom"], [f"--screenshot={shot}"]):
        done = subprocess.run(
            [*command, "--virtual-time-budget=5000", *more, frame.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        assert "CONSOLE" not in done.stderr
        if more == ["--dump-dom"]:
            title = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout)
            assert title is not None
            scroll, client, height = map(int, title.groups())
            assert scroll <= client and height > 1500
    pixels = np.asarray(Image.open(shot).convert("L"))[:, :width]
    assert (pixels.std(1) > 0)[:2500].mean() > 0.3, "it is not empty"


def test_a_picture_of_every_site_kind_does_not_fail(tmp_path: Path, class_folders: Path) -> None:
    """Windows, for one, have maps that cover no image: then there is no such picture."""
    import timm
    from timm.models import save_for_hf

    torch.manual_seed(0)
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(1, 1), num_heads=(1, 2), num_classes=3
    )
    save_for_hf(swin, tmp_path / "swin", model_config={}, safe_serialization=True)
    request = {"source__model": str(tmp_path / "swin"), "data__path": str(class_folders), "run__device": "cpu"}
    rules = {"convert": [{"drop": ["all"]}], "output__dir": str(tmp_path / "out"), "distill__steps": 0}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(record, "LOOKED_AT", 4)
        report = convert(
            override(Recipe(), **request, **rules, data__workers=0, distill__calibration__images=0), ignore_labels=True
        ).report
    assert report["routing"].keys() == {s["site"]["path"] for s in report["plan"]}
    assert "report.html" in {p.name for p in (tmp_path / "out").iterdir()}
