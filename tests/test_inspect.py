from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run
from vit2linear.errors import SourceNotFoundError
from vit2linear.inspection import inspect
from vit2linear.recipe import OPERATORS


def test_no_weight_is_read(checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    found = json.loads(cli("inspect", folder, "--op", "agent", "--json").stdout)
    assert found["layout"] == "timm" and found["architecture"] == "vit_tiny_patch16_224"
    assert found["input_size"] == [3, 32, 32] and found["num_classes"] == 5 and found["refused"] is None
    assert [s["site"]["path"] for s in found["sites"]] == [f"blocks.{i}.attn" for i in range(4)]
    first = found["sites"][0]
    assert first["site"]["geometry"] == {"width": 48, "num_heads": 3, "head_dim": 16, "scale": 0.25}
    assert (first["queries"], first["keys"], first["grid"]) == (17, 17, [4, 4])
    assert first["evaluation"] == "linear order, 4 landmarks"
    assert found["parameters"] == sum(p.numel() for p in timm_model(checkpoint).parameters())


def timm_model(folder: Path) -> object:
    import timm

    return timm.create_model(f"local-dir:{folder}", pretrained=True)


def test_flops_are_those_of_the_sizes(checkpoint: Path) -> None:
    """Softmax's two products are quadratic in the tokens, everything else is linear."""
    small, large = (inspect(str(checkpoint), size=(side, side)) for side in (64, 128))
    tokens = 65, 257
    core = [4 * 2 * 2 * n**2 * 48 for n in tokens]
    rest = [found.flops_before - products for found, products in zip((small, large), core, strict=True)]
    patches = [2 * (n - 1) * 8 * 8 * 3 * 48 for n in tokens]
    head = 2 * 48 * 5
    per_token = [(r - p - head) / n for r, p, n in zip(rest, patches, tokens, strict=True)]
    assert per_token[0] == per_token[1] == 4 * 2 * 12 * 48**2
    assert large.flops is not None and large.flops < large.flops_before


def test_a_person_reads_it(checkpoint: Path, cli: Run) -> None:
    done = cli("inspect", checkpoint, "--img-size", "64x32")
    assert "GFLOPs of an image" in done.stdout and "3x64x32" in done.stdout and "blocks.3.attn" in done.stdout
    assert "resized for it: pos_embed 1x17x48 -> 1x33x48" in done.stderr
    assert "--op relu --dry-run" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("op", OPERATORS.names())
def test_every_operator(checkpoint: Path, op: str) -> None:
    found = inspect(str(checkpoint), op)
    assert len(found.sites) == 4 and all(s["evaluation"] for s in found.sites) and not found.losses


def test_what_is_wrong_is_said_first(checkpoint: Path, cli: Run) -> None:
    assert "Did you mean 'relu'" in cli("inspect", checkpoint, "--op", "rely", code=2).stderr
    assert "is no size in pixels" in cli("inspect", checkpoint, "--img-size", "big", code=2).stderr
    assert "no folder" in cli("inspect", "local-dir:nowhere", code=3).stderr
    with pytest.raises(SourceNotFoundError):
        inspect("vit_tiny_patch17")
