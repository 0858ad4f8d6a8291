"""One process and two, by the command that a user types: the same gradients, the same losses, the same artifact."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from timm.models import save_for_hf
from torch import Tensor

from tests.gradient_probe import STEPS

pytestmark = pytest.mark.slow

STAGES = ("attention", "feature", "task")
CLIP = 3.35
"""Between the gradient norms at steps 1 and 5, of every stage; rates and losses are chosen for that."""
SETTINGS = {
    "attention": "lr = 5e-5\nlosses = { site_output = 0.8 }",
    "feature": "lr = 5e-5",
    "task": "lr = 1e-4\nlosses = { labels = 0.51, site_mse = 25.5 }",
}
RECIPE = f"""
[distill]
steps = {max(STEPS) * len(STAGES)}
batch_size = 4
clip = {CLIP}
calibration.images = 0
""" + "".join(f"\n[distill.{stage}]\nshare = 1.0\n{SETTINGS[stage]}\n" for stage in STAGES)
TOLERANCE = {1: 1e-5, 5: 1e-4}
"""Of a tensor's largest gradient, by step. Sums over 4 images or twice 2 round differently: 3e-6 at step 1 as measured.
Adam divides by the gradients' own size, so rounding moves weights and grows with the steps: 4e-6 at step 5."""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Trained:
    """What a run of ``convert`` left behind."""

    folder: Path
    stderr: str

    def seen(self, stage: str, step: int, rank: int) -> tuple[dict[str, Tensor], int]:
        """Gradients and weights before a step, and the number of processes."""
        path = self.folder / f"{STAGES.index(stage)}-{step}-{rank}.safetensors"
        with safe_open(path, "pt") as file:
            return load_file(path), int(file.metadata()["world"])

    def losses(self, stage: str) -> list[float]:
        """Of every step."""
        stages = json.loads((self.folder / "artifact" / "report.json").read_text())["stages"]
        return [loss for _, loss in stages[STAGES.index(stage)]["losses"]]


def arguments(source: Path, images: Path, folder: Path, op: str) -> list[str]:
    """``-m vit2linear convert ...``, to run in ``folder``."""
    (folder / "recipe.toml").write_text(RECIPE)
    command = ["-m", "vit2linear", "convert", str(source), "--op", op, "--recipe", "recipe.toml", "--data", str(images)]
    return [*command, "-j", "0", "--output", "artifact"]


def convert(
    source: Path, images: Path, folder: Path, *launch: str, op: str = "Picky", more: Sequence[str] = ()
) -> Trained:
    folder.mkdir()
    command = [sys.executable, *launch, *arguments(source, images, folder, f"tests.gradient_probe:{op}"), *more]
    environment = ENVIRONMENT | {"GRADIENT_PROBE": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            _, stderr = run.communicate(timeout=250)
        finally:
            run.terminate()  # torchrun then ends its workers, which it could not if it were killed
    assert run.returncode == 0, stderr
    return Trained(folder, stderr)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and val/ of three classes; of two images one is dark and nearly flat, the other bright and noisy."""
    root, rng = tmp_path_factory.mktemp("uneven"), np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for name in ("bread", "dog", "egg"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                low, high = ((20, 30), (120, 256))[i % 2]
                pixels = rng.integers(low, high, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny classifier with peaked attention, so that there is something to recover."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=5
    )
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.ndim == 2 else 1)
    for block in model.blocks:
        block.attn.qkv.weight.data[:96] *= 6
    folder = tmp_path_factory.mktemp("source") / "peaked"
    labels = {"label_names": ["apple", "bread", "cup", "dog", "egg"]}
    save_for_hf(model, folder, model_config=labels, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def runs(source: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Trained]:
    """The same command by one process and by two."""
    root = tmp_path_factory.mktemp("runs")
    return convert(source, images, root / "one"), convert(source, images, root / "two", *TORCHRUN)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients(runs: tuple[Trained, Trained], stage: str, step: int) -> None:
    one, two = runs
    alone, world = one.seen(stage, step, 0)
    assert world == 1
    main, world = two.seen(stage, step, 0)
    other, others_world = two.seen(stage, step, 1)
    assert world == others_world == 2
    assert main.keys() == other.keys() and all(torch.equal(main[k], other[k]) for k in main), "the processes agree"
    gradients = [k for k in alone if k.startswith("gradient")]
    assert main.keys() == alone.keys() and gradients, "the same parameters have one"
    for key in gradients:
        largest = alone[key].abs().max().item()
        torch.testing.assert_close(main[key], alone[key], rtol=10 * TOLERANCE[step], atol=TOLERANCE[step] * largest)


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_is_of_averaged_gradients(runs: tuple[Trained, Trained], stage: str) -> None:
    seen = [runs[1].seen(stage, step, 0)[0] for step in STEPS]
    norms = [torch.cat([g.flatten() for k, g in s.items() if k.startswith("gradient")]).norm().item() for s in seen]
    assert max(norms) == pytest.approx(CLIP, rel=1e-4) and min(norms) < 0.99 * CLIP


@pytest.mark.parametrize("stage", STAGES)
def test_losses(runs: tuple[Trained, Trained], stage: str) -> None:
    one, two = (run.losses(stage) for run in runs)
    assert len(one) == max(STEPS) and two == pytest.approx(one, rel=1e-4)


def test_losses_of_two_processes_whose_steps_go_through_in_two_parts(
    runs: tuple[Trained, Trained], source: Path, images: Path, tmp_path: Path
) -> None:
    """One image at a time on each; nothing is averaged until the step is whole."""
    parted = convert(source, images, tmp_path / "parted", *TORCHRUN, more=["--grad-accum-steps", "2"])
    assert [parted.seen("feature", 1, rank)[1] for rank in (0, 1)] == [2, 2]
    for stage in STAGES:
        assert parted.losses(stage) == pytest.approx(runs[0].losses(stage), rel=1e-4)


def test_a_process_that_runs_out_of_memory_goes_on_in_parts(
    runs: tuple[Trained, Trained], source: Path, images: Path, tmp_path: Path
) -> None:
    """The other one waits for it, and knows nothing."""
    cramped = convert(source, images, tmp_path / "cramped", *TORCHRUN, op="Cramped")
    for stage in STAGES:
        assert cramped.losses(stage) == pytest.approx(runs[0].losses(stage), rel=1e-4)


def test_one_artifact_by_the_main_process(runs: tuple[Trained, Trained]) -> None:
    one, two = (load_file(run.folder / "artifact" / "model.safetensors") for run in runs)
    assert one.keys() == two.keys()
    # Every learning rate is 5e-5 or more, so each of 5 steps may move a weight by that much.
    assert max((one[k] - two[k]).abs().max() for k in one) < 1e-5
    assert runs[1].stderr.count("before training") == 1, "one process speaks"
    assert {p.name for p in runs[1].folder.iterdir() if p.suffix != ".safetensors"} == {"artifact", "recipe.toml"}


def test_a_loss_that_is_not_finite_on_one_process_ends_all(source: Path, images: Path, tmp_path: Path) -> None:
    """Without torchrun, which would end the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = arguments(source, images, tmp_path, "tests.gradient_probe:NotANumber")
    ranks = [meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    runs = [
        subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=ENVIRONMENT | rank, stderr=subprocess.PIPE, text=True
        )
        for rank in ranks
    ]
    try:
        for run in runs:
            _, stderr = run.communicate(timeout=200)
            assert "error: stage attention, step 5 of 5: the loss at site 'blocks.0.attn' is nan" in stderr
            assert run.returncode == 6
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    assert not (tmp_path / "artifact").exists()


def test_a_batch_that_cannot_be_shared_is_refused_before_any_work(source: Path, images: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        *TORCHRUN,
        "-m",
        "vit2linear",
        "convert",
        str(source),
        "--data",
        str(images),
        "-b",
        "3",
        "-o",
        "artifact",
    ]
    done = subprocess.run(
        [*command, "--device", "cpu"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    assert "error: distill.batch_size is 3, which 2 processes cannot share evenly." in done.stderr
    assert "before training" not in done.stderr and not [*tmp_path.iterdir()]
