from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.conftest import Run
from tests.interrupted import (
    EVERYTHING,
    Scissors,
    assert_same,
    checkpoints,
    interrupt,
    request,
    run_folder,
)
from vit2linear import Recipe, convert
from vit2linear.artifact import open_artifact
from vit2linear.errors import ArtifactError, NotFiniteError, RecipeError, StoppedError
from vit2linear.journal import refuse_changes, settings_of
from vit2linear.recipe import override
from vit2linear.site import LinearAttention

# Places by what was heard last and how many sites ran since. One run is cut at all of a list, one after the other.
SOME = (("before training", 5), ("attention 2", 3), ("after stage attention", 9), ("feature 3", 2), ("task 3", 0))
INSIDE = (
    ("before training", 0),  # evaluated, which no checkpoint knows yet
    ("before training", 5),  # in the closed form
    ("after calibration", 1),  # in the first step
    ("attention 1", 0),
    ("attention 2", 3),  # in the third step
    ("attention 3", 2),  # in the evaluation after the stage
    ("after stage attention", 9),  # in the second closed form
    ("feature 1", 0),
    ("feature 2", 7),
    ("feature 3", 2),  # choosing between the last and the averaged weights
    ("task 2", 7),
    ("task 3", 60),  # in the last evaluation
    ("after stage task", 6),  # while the artifact is read back
)
BORDERS = (
    ("after calibration", 0),
    ("attention 2", 0),
    ("attention 3", 0),  # the last step is taken, the stage is not over
    ("after stage attention", 0),
    ("after calibration before stage feature", 0),
    ("feature 3", 0),
    ("after stage feature", 0),
    ("task 1", 0),
    ("task 2", 0),
    ("task 3", 0),
    ("after stage task", 0),
)


@pytest.fixture(scope="module")
def whole(checkpoint: Path, class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of an uninterrupted run with everything."""
    output = tmp_path_factory.mktemp("whole") / "out"
    convert(request(checkpoint, class_folders, output, **EVERYTHING))
    return output


@pytest.fixture(scope="module")
def short(checkpoint: Path, class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``whole``, uninterrupted, and ``cut.run``, interrupted after the first of two steps."""
    folder = tmp_path_factory.mktemp("short")
    convert(request(checkpoint, class_folders, folder / "whole"))
    interrupt(request(checkpoint, class_folders, folder / "cut"), "attention 1")
    return folder


@pytest.fixture
def recipe(checkpoint: Path, class_folders: Path, tmp_path: Path) -> Recipe:
    """A short conversion to ``out`` in an empty folder."""
    return request(checkpoint, class_folders, tmp_path / "out")


@pytest.fixture
def interrupted(short: Path, recipe: Recipe) -> Recipe:
    """The same, interrupted after the first of its two steps."""
    shutil.copytree(short / "cut.run", run_folder(recipe))
    return recipe


def output_of(recipe: Recipe) -> Path:
    return Path(str(recipe.output.dir))


@pytest.mark.parametrize(
    ("places", "killed", "every", "workers"),
    [
        pytest.param(SOME, True, 1, 0, id="some"),
        pytest.param(INSIDE, True, 1, 2, id="inside", marks=pytest.mark.slow),
        pytest.param(INSIDE, True, None, 0, id="inside-rare", marks=pytest.mark.slow),
        pytest.param(INSIDE, False, None, 0, id="inside-error", marks=pytest.mark.slow),
        pytest.param(BORDERS, True, 3, 0, id="borders", marks=pytest.mark.slow),
        pytest.param(BORDERS, False, 100, 2, id="borders-error", marks=pytest.mark.slow),
    ],
)
def test_a_run_cut_again_and_again_ends_as_an_uninterrupted_one(
    places: tuple[tuple[str, int], ...],
    killed: bool,
    every: int | None,
    workers: int,
    whole: Path,
    checkpoint: Path,
    class_folders: Path,
    tmp_path: Path,
) -> None:
    changes = EVERYTHING | {"run__checkpoint_every": every, "data__workers": workers}
    recipe = request(checkpoint, class_folders, tmp_path / "out", **changes)
    for event, calls in places:
        interrupt(recipe, event, calls, killed)
        assert len(checkpoints(recipe)) == 1
    convert(recipe, resume=True)
    assert_same(whole, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "nothing else is left"


@pytest.mark.parametrize(("every", "kept"), [(1, "checkpoint-1-3"), (3, "checkpoint-1-3"), (4, "checkpoint-1-0")])
def test_a_checkpoint_every_so_many_steps(every: int, kept: str, recipe: Recipe) -> None:
    recipe = override(recipe, distill__steps=6, run__checkpoint_every=every)
    interrupt(recipe, "attention 4", killed=True)
    assert checkpoints(recipe) == [kept]


def test_what_a_checkpoint_holds(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    """Student, average, two moments of the optimiser: no teacher, and no pickle."""
    recipe = request(checkpoint, class_folders, tmp_path / "out", **EVERYTHING)
    interrupt(recipe, "feature 2")
    (folder,) = run_folder(recipe).glob("checkpoint-*")
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert files.keys() == {"state.json", "student.safetensors", "average.safetensors", "optimiser.safetensors"}
    model = (checkpoint / "model.safetensors").stat().st_size
    assert all(size < 1.1 * model for name, size in files.items() if name != "optimiser.safetensors")
    assert files["optimiser.safetensors"] < 2.2 * model and sum(files.values()) < 4.4 * model
    json.loads((folder / "state.json").read_text())
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert [*file.keys()]


FRESH = "starts"
ANEW = "starts anew"
REPLACES = "starts anew, replaces"
GOES_ON = "goes on"
GOES_ON_REPLACES = "goes on, replaces"
STAYS = "returns it"
REFUSED = "refused"
SEMANTICS = {
    # what is there: without a flag, --resume, --overwrite, both
    "nothing": (FRESH, FRESH, FRESH, FRESH),
    "an interrupted run": (REFUSED, GOES_ON, ANEW, GOES_ON),
    "a finished artifact": (REFUSED, STAYS, REPLACES, REPLACES),
    "both of them": (REFUSED, STAYS, REPLACES, GOES_ON_REPLACES),
}


def test_the_documented_table_is_this_one() -> None:
    rows = {there: f"| {' | '.join((there, *cells))} |" for there, cells in SEMANTICS.items()}
    text = (Path(__file__).parents[1] / "docs" / "reliability.md").read_text("utf-8")
    assert "\n".join(rows.values()) in text


@pytest.mark.parametrize("flags", range(4), ids=["none", "resume", "overwrite", "resume-overwrite"])
@pytest.mark.parametrize("there", SEMANTICS)
def test_resume_and_overwrite(there: str, flags: int, short: Path, recipe: Recipe) -> None:
    output, wanted = output_of(recipe), SEMANTICS[there][flags]
    if there in ("an interrupted run", "both of them"):
        shutil.copytree(short / "cut.run", run_folder(recipe))
    if there in ("a finished artifact", "both of them"):
        shutil.copytree(short / "whole", output)
        (output / "README.md").write_text("the first one\n")
    scissors, before = Scissors(), checkpoints(recipe)
    resume, overwrite = bool(flags & 1), bool(flags & 2)
    if wanted == REFUSED:
        with pytest.raises(ArtifactError) as refused:
            convert(recipe, resume=resume, overwrite=overwrite)
        assert refused.value.exit_code == 7 and "--overwrite" in str(refused.value)
        assert checkpoints(recipe) == before
    else:
        convert(recipe, resume=resume, overwrite=overwrite, reporter=scissors)
        said = " / ".join(scissors.heard)
        assert ("going on from" in said) == wanted.startswith(GOES_ON)
        assert ("attention 1" in said) == ("starts" in wanted)
        assert ("is finished" in said) == (wanted == STAYS)
        assert_same(short / "whole", output)
        assert [p.name for p in output.parent.iterdir()] == ["out"]
    if output.exists():
        first = (output / "README.md").read_text() == "the first one\n"
        assert first == (wanted in (REFUSED, STAYS))


@pytest.mark.parametrize("renames", [1, 2])
def test_killed_between_the_renames_that_replace_an_artifact(renames: int, short: Path, interrupted: Recipe) -> None:
    """What was there comes back, or makes room."""
    output, run = output_of(interrupted), run_folder(interrupted)
    shutil.copytree(short / "whole", run / "replaced")
    (run / "replaced" / "README.md").write_text("the first one\n")
    if renames == 2:
        shutil.copytree(short / "whole", output)
    with pytest.raises(ArtifactError, match="exists"):
        convert(interrupted)
    assert ((output / "README.md").read_text() == "the first one\n") == (renames == 1)
    assert (run / "replaced").exists() == (renames == 2)
    convert(interrupted, resume=True, overwrite=True)
    assert_same(short / "whole", output)
    assert (output / "README.md").read_text() != "the first one\n"
    assert [p.name for p in output.parent.iterdir()] == ["out"]


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names of all that a recipe states, with another value each."""
    for field in dataclasses.fields(value):
        name, item = f"{where}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(item):
            yield from leaves(item, f"{name}.")
        elif name == "convert":
            yield name, [{"op": "elu"}]
        elif isinstance(item, dict):
            yield name, {**item, "relational": 0.5}
        elif isinstance(item, tuple):
            yield name, [*item, item[0] if item else "x"]
        elif isinstance(item, bool):
            yield name, not item
        elif isinstance(item, int | float):
            yield name, item + 1
        else:
            yield name, {"init": "mlp", "head": "random", "augment": "none", "device": "cpu"}.get(field.name)


def test_every_setting_but_some_is_refused_by_its_name() -> None:
    """Free are those that change no weight."""
    numbers = {"steps", "img_size", "images", "lr", "lr_rest", "lr_new", "eval_samples", "checkpoint_every"}
    base, free, all_names = Recipe(), set(), set()
    for name, value in leaves(base):
        all_names.add(name)
        last = name.split(".")[-1]
        if value is None:
            value = 3 if last in numbers else "no" if last == "mixed_precision" else "other"
        changed = override(base, **{name.replace(".", "__"): value})
        assert changed != base, name
        try:
            refuse_changes(settings_of(base), settings_of(changed))
        except RecipeError as error:
            assert name in error.message and "--overwrite" in str(error)
        else:
            free.add(name)
    wanted = {"data.workers", "data.max_bad", "output.dir", "output.license", "output.bench", "run.checkpoint_every"}
    wanted |= {"run.track"}
    assert free == wanted & all_names


def test_changed_settings_are_named_one_by_one(interrupted: Recipe, cli: Run) -> None:
    command = ["convert", interrupted.source.model, "--data", interrupted.data.path, "-o", output_of(interrupted)]
    changes = ["--op", "elu", "--seed", 1, "-b", 5, "--ignore-labels", "--device", "cpu", "--resume"]
    before = checkpoints(interrupted)
    said = cli(*command, *changes, code=2).stderr
    for change in (
        "run.seed was 0 and is 1",
        "distill.batch_size was 4 and is 5",
        "distill.steps was 2 and is 2000",
        "convert.0.op was 'relu' and is 'elu'",
        "ignore_labels was False and is True",
    ):
        assert change in said
    assert checkpoints(interrupted) == before, "nothing is lost"


def test_other_weights_under_the_same_name_are_refused(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint, tmp_path / "tiny")
    recipe = request(source, class_folders, tmp_path / "out")
    interrupt(recipe, "attention 1")
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0?")
    with pytest.raises(RecipeError, match=r"source.weights_sha256 was"):
        convert(recipe, resume=True)


def test_more_or_fewer_images_are_refused(class_folders: Path, interrupted: Recipe, tmp_path: Path) -> None:
    """They would come in another order."""
    images = shutil.copytree(class_folders, tmp_path / "images")
    recipe = override(interrupted, data__path=str(images), output__dir=str(tmp_path / "other"))
    interrupt(recipe, "attention 1")
    next((images / "train" / "dog").iterdir()).unlink()
    with pytest.raises(RecipeError, match=r"images of .*images was 36 and is 35"):
        convert(recipe, resume=True)


def test_what_changes_no_weight_may_change(short: Path, interrupted: Recipe) -> None:
    free = {"data__workers": 1, "output__license": "apache-2.0", "run__checkpoint_every": 1}
    convert(override(interrupted, **free), resume=True)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (short / "whole", output_of(interrupted))]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("changes", [{"run__seed": 1}, {"convert": [{"op": "elu"}]}, {"distill__steps": 3}])
def test_a_finished_artifact_of_other_settings_is_refused(changes: dict[str, Any], short: Path, recipe: Recipe) -> None:
    output = shutil.copytree(short / "whole", output_of(recipe))
    with pytest.raises(RecipeError, match=r"seed was 0 and is 1|op was 'relu' and is 'elu'|steps was 2 and is 3"):
        convert(override(recipe, **changes), resume=True)
    assert_same(short / "whole", output)


def test_a_finished_artifact_of_other_weights_or_labels_is_refused(
    short: Path, checkpoint: Path, recipe: Recipe, tmp_path: Path
) -> None:
    shutil.copytree(short / "whole", output_of(recipe))
    with pytest.raises(RecipeError, match="ignore_labels was False and is True"):
        convert(recipe, resume=True, ignore_labels=True)
    report = output_of(recipe) / "report.json"
    sha = json.loads(report.read_text())["source"]["weights_sha256"]
    report.write_text(report.read_text().replace(sha, "0" * 64))
    with pytest.raises(RecipeError, match=r"source.weights_sha256 was '0000"):
        convert(recipe, resume=True)


@pytest.mark.parametrize("damage", ["empty", "truncated", "missing"])
@pytest.mark.parametrize("name", ["state.json", "student.safetensors", "optimiser.safetensors"])
def test_a_damaged_checkpoint_is_an_error_that_names_it(name: str, damage: str, interrupted: Recipe) -> None:
    path = run_folder(interrupted) / "checkpoint-1-1" / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "truncated" else 0])
    with pytest.raises(ArtifactError, match=r"the checkpoint '.*checkpoint-1-1' cannot be read.*--overwrite") as error:
        convert(interrupted, resume=True)
    assert name in str(error.value)


def test_metrics_that_were_cut_in_the_middle_of_a_line_are_mended(short: Path, interrupted: Recipe) -> None:
    metrics = run_folder(interrupted) / "metrics.jsonl"
    line = metrics.read_text()
    metrics.write_text(line + line.replace('"step": 1', '"step": 2') + line[:20])
    convert(interrupted, resume=True)
    assert_same(short / "whole", output_of(interrupted))


@pytest.mark.parametrize(
    ("event", "times", "kept", "number"),
    [
        ("attention 1", 1, 1, signal.SIGINT),
        ("attention 1", 1, 1, signal.SIGTERM),
        ("attention 1", 2, 1, signal.SIGINT),
        ("before training", 1, 0, signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_run_with_a_checkpoint(
    event: str, times: int, kept: int, number: signal.Signals, short: Path, recipe: Recipe
) -> None:
    """Noted during a step, so that it is finished; elsewhere, and the second time, at once."""

    class Signalled(Scissors):
        def cut(self) -> None:
            for _ in range(times):
                signal.raise_signal(number)

    before = signal.getsignal(number)
    scissors = Signalled(event)
    with pytest.raises(StoppedError, match=f"stopped by {number.name}.*--resume") as stopped:
        convert(recipe, reporter=scissors)
    assert stopped.value.exit_code == 128 + number and scissors.heard[-1] == scissors.event
    assert signal.getsignal(number) is before
    assert checkpoints(recipe) == [f"checkpoint-1-{kept}"]
    convert(recipe, resume=True)
    assert_same(short / "whole", output_of(recipe))


def test_a_thread_converts_without_signals(short: Path, interrupted: Recipe) -> None:
    """Python gives them to the main thread only."""
    before, failed = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        try:
            convert(interrupted, resume=True)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        assert signal.getsignal(signal.SIGTERM) is before
        thread.join(0.05)
    assert not failed
    assert_same(short / "whole", output_of(interrupted))


def test_many_steps_that_are_not_finite_end_the_run_and_leave_the_checkpoint_before_them(recipe: Recipe) -> None:
    scissors = Scissors()

    def poison(module: nn.Module, args: Any, output: Any) -> Any:
        """From step 6 on."""
        return output * torch.nan if isinstance(module, LinearAttention) and "attention 5" in scissors.heard else None

    changes = {"distill__steps": 40, "distill__batch_size": 2, "run__checkpoint_every": 2}
    handle = register_module_forward_hook(poison)
    try:
        with pytest.raises(NotFiniteError) as error:
            convert(override(recipe, **changes), reporter=scissors)
    finally:
        handle.remove()
    said = str(error.value)
    assert "stage attention, step 25 of 40: the loss at site 'blocks.0.attn' is nan" in said
    assert checkpoints(recipe) == ["checkpoint-1-4"] and f"{run_folder(recipe) / 'checkpoint-1-4'}" in said


def test_json_output_is_the_report_alone(interrupted: Recipe, cli: Run, tmp_path: Path) -> None:
    """Of a run that goes on, and of one that has nothing left to do."""
    (tmp_path / "recipe.toml").write_text("[distill]\nsteps = 2\nbatch_size = 4\nfeature.share = 0.0\n")
    command = ["convert", interrupted.source.model, "--data", interrupted.data.path, "-o", output_of(interrupted)]
    command += ["--recipe", tmp_path / "recipe.toml", "-j", 0, "--device", "cpu", "--resume", "--json"]
    for words in ("going on from 'checkpoint-1-1'", "is finished; nothing is left to resume"):
        done = cli(*command)
        assert words in done.stderr
        assert json.loads(done.stdout) == open_artifact(str(output_of(interrupted))).report


def test_softmax_that_is_kept_is_measured_once(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    """And what may change when a run is resumed is as the resumed run wants it."""
    whole = request(checkpoint, class_folders, tmp_path / "whole", keep_softmax=2)
    convert(whole)
    recipe = override(whole, output__dir=str(tmp_path / "out"))
    heard = interrupt(recipe, "attention 1")
    assert any(event.startswith("converting blocks") for event in heard)
    moved = override(recipe, output__dir=str(tmp_path / "elsewhere" / "out"))
    (tmp_path / "elsewhere").mkdir()
    run_folder(recipe).rename(run_folder(moved))
    scissors = Scissors()
    artifact = convert(moved, resume=True, reporter=scissors)
    assert not any(event.startswith("converting blocks") for event in scissors.heard)
    assert artifact.folder == tmp_path / "elsewhere" / "out"
    assert artifact.report["keep_softmax"] == open_artifact(str(tmp_path / "whole")).report["keep_softmax"]
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "whole", artifact.folder)]
    assert weights[0] == weights[1]
    # Finished, with rules in the recipe that it was written with.
    convert(moved, resume=True)
    for changes in ({"keep_softmax": 1}, {"keep_softmax": 2, "convert": [{"op": "elu"}]}):
        with pytest.raises(RecipeError, match=r"keep_softmax|was 'relu' and is 'elu'"):
            convert(override(moved, **changes), resume=True)
