from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from tests.conftest import Run
from vit2linear.bench import BOUND, Job, Measurement, crossover, flops, keeping, measure, without_routing
from vit2linear.errors import RecipeError
from vit2linear.recipe import Rule
from vit2linear.site import sites_of
from vit2linear.sizes import parse_sizes, show_size

TINY = {"embed_dim": 48, "num_heads": 3, "depth": 2}


def test_flops_grow_as_they_should() -> None:
    """Per token the bound is constant, relu nearly so, and softmax's products quadruple for twice the side, twice."""
    job = Job("vit_tiny_patch16_224", {"relu": (Rule(),)}, TINY)
    small, large = (
        {name: flops(job, name, size) for name in ("softmax", "relu", BOUND)} for size in ((256, 256), (512, 512))
    )
    tokens = 257, 1025
    assert large[BOUND] / small[BOUND] == pytest.approx(tokens[1] / tokens[0], rel=0.01)
    core = [found["softmax"] - found[BOUND] for found in (small, large)]
    wanted = [2 * 4 * n**2 * 48 for n in tokens]  # two blocks, two products of N x N x width, 2 operations each
    assert core == wanted
    linear = [found["relu"] - found[BOUND] for found in (small, large)]
    assert linear[1] / linear[0] == pytest.approx(tokens[1] / tokens[0], rel=0.01)


def test_hybrids_are_measured_beside_each_other() -> None:
    job = keeping(Job("vit_tiny_patch16_224", {"relu": (Rule(),)}, {**TINY, "depth": 3}), [0, 2])
    assert [*job.variants] == ["relu", "relu, 2 kept"]
    ops = [[s.op.name for s in sites_of(job.model(name, (64, 64))).values()] for name in job.variants]
    assert ops == [["relu"] * 3, ["relu"]]
    cost = {name: flops(job, name, (512, 512)) for name in ("softmax", *job.variants)}
    third = (cost["softmax"] - cost["relu"]) / 3
    assert cost["softmax"] - cost["relu, 2 kept"] == pytest.approx(third, rel=1e-6)
    with pytest.raises(RecipeError, match="3 sites are to keep the softmax, and vit_tiny_patch16_224 has 3"):
        keeping(job, [3])


def test_the_bound_is_the_model_without_attention() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, **TINY).eval()
    bound = without_routing(model)
    attn, x = model.blocks[0].attn, torch.randn(1, 5, 48)
    v = attn.qkv(x)[..., 96:]
    torch.testing.assert_close(bound.blocks[0].attn(x), attn.proj(v))


def test_measurements_and_crossover() -> None:
    job = Job("vit_tiny_patch16_224", {"relu": (Rule(),)}, TINY)
    found = measure(job, (64, 64), torch.device("cpu"), rounds=2)
    assert [m.name for m in found] == ["softmax", "relu", BOUND]
    assert all(
        m.images_per_second > 0 and m.tokens == 17 and m.peak_mib is not None and m.peak_mib > 0.1 for m in found
    )
    assert found[0].against_softmax == 1 and found[2].against_bound == 1

    def rows(*speeds: tuple[int, float]) -> list[Measurement]:
        return [Measurement(size, size, 0, "relu", 1.0, speed, 1.0, 1.0, None) for size, speed in speeds]

    assert crossover(rows((224, 0.9), (512, 1.2), (1024, 2.0)), "relu") == (512, 512)
    assert crossover(rows((224, 1.1), (512, 0.9), (1024, 2.0)), "relu") == (1024, 1024)
    assert crossover(rows((224, 1.1), (512, 0.9)), "relu") is None


def test_sizes() -> None:
    assert parse_sizes("224, 512x768") == [(224, 224), (512, 768)]
    assert [show_size(size) for size in parse_sizes("224,512x768")] == ["224", "512x768"]


@pytest.mark.parametrize("text", ["", "224,", "big", "0", "-5,3", "512x", "1x2x3"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(RecipeError, match="is no size in pixels"):
        parse_sizes(text)


def test_command_and_picture(cli: Run) -> None:
    args = ["--base", "test_vit", "--op", "relu,elu", "--img-size", "64,64x96", "--rounds", 1, "--no-memory"]
    done = json.loads(cli("bench", *args, "--plot", "bench.png", "--json").stdout)
    assert {(m["name"], m["width"]) for m in done["measurements"]} == {
        (name, size) for name in ("softmax", "relu", "elu", "bound") for size in (64, 96)
    }
    assert set(done["wins_from"]) == {"relu", "elu"}
    with Image.open("bench.png") as picture:
        assert picture.size[0] > 500
    assert "of bound" in cli("bench", *args).stdout
    assert "unknown operator 'rellu'" in cli("bench", "--op", "rellu", code=2).stderr


def test_an_artifact_is_measured_with_its_own_operators(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    cli("convert", checkpoint, "--op", "elu", "--data", class_folders, "--distill-steps", 0, "-j", 0, "--device", "cpu")
    done = json.loads(cli("bench", "tiny-elu", "--img-size", "32", "--rounds", 1, "--no-memory", "--json").stdout)
    assert [m["name"] for m in done["measurements"]] == ["softmax", "this model", "bound"]
    assert done["measurements"][0]["tokens"] == 17
