"""What the user asked for: frozen dataclasses, a strict TOML reader and a writer.

A recipe is complete by itself: the effective one (defaults, file and flags merged) is written beside the weights and
runs again with ``--recipe``. Unknown keys, wrong types and wrong values are all reported together. No torch here, so
that a misspelt recipe is refused at once.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vit2linear.errors import RecipeError, Vit2LinearError
from vit2linear.registry import Registry
from vit2linear.strict import build, malformed, raise_all

KEEP = "keep"
"""Reserved operator name in a rule: leave the site as it is."""

ALL = "all"
"""Reserved name in ``drop``: whatever the operator cannot carry."""

OPERATORS: Registry[Any] = Registry(
    "operator", "vit2linear.ops", "vit2linear.operator:Operator", entry_points="vit2linear.operators"
)


@dataclass(frozen=True)
class SourceOptions:
    """``[source]``: the pretrained model."""

    model: str = ""
    """``demo``, a folder, a file of weights, a Hub id, a timm name, ``hf-hub:ID`` or ``local-dir:PATH``."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; the commit it resolves to is recorded."""
    arch: str | None = None
    """timm's name of the architecture, with or without a tag, where no config describes the weights."""
    img_size: int | tuple[int, ...] | None = None
    """Side of the square input in pixels, or height and width; default: what the source's own preprocessing says."""
    init: Literal["full", "mlp", "attention", "random", "mimetic"] = "full"
    """What of the source's weights the student starts from: ``full`` copies all that has a counterpart; the others are
    the rows of the paper's table (arXiv 2609.35745): the MLPs only, the query, key and value projections only, nothing,
    and nothing with mimetic attention (Trockman and Kolter, arXiv 2305.09828). What is not copied is drawn anew."""
    head: Literal["copy", "random"] = "copy"
    """Whether the class head is copied, whatever ``init`` says; the paper draws it anew."""

    @property
    def size(self) -> tuple[int, int] | None:
        """Height and width in pixels, where the user wants others than the source's own."""
        sides = (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size
        return None if sides is None else (sides[0], sides[1])


@dataclass(frozen=True)
class Rule:
    """``[[convert]]``: which operator replaces the softmax where. The first rule that matches a site wins."""

    op: str = "relu"
    """An operator's name, or ``keep``."""
    sites: str = "*"
    """Glob on the site's path, such as ``blocks.[0-8].attn``. A rule that matches no site is an error."""
    options: dict[str, Any] = field(default_factory=dict)
    """The operator's own options; see ``vit2linear ops show NAME``."""
    local: Literal["none", "dwc3", "dwc5"] = "none"
    """Depthwise 3x3 or 5x5 convolution of the values on the patch grid, added to the operator; starts at zero."""
    center_keys: bool = False
    """Subtract the mean key over tokens, which softmax does not see."""
    drop: tuple[str, ...] = ()
    """What of the source's attention may be given up where the operator cannot carry it, such as
    ``relative-position-bias``; ``all`` for whatever it is. Without it such a site is an error."""
    global_windows: bool = False
    """Route over the whole map where the source routes inside windows: what a linear cost buys."""


@dataclass(frozen=True)
class Stage:
    """``[distill.attention]``, ``[distill.feature]`` or ``[distill.task]``."""

    share: float
    """Part of ``distill.steps`` that this stage gets; the shares are normalised to sum to 1."""
    losses: dict[str, float]
    """Loss name to weight."""
    lr: float | None
    """Peak learning rate of copied attention weights; default: 1e-3 in stage ``attention`` and 3e-4 in the others for a
    model 384 wide, and inversely with its width."""
    lr_rest: float | None
    """Peak learning rate of the other copied weights; 0 freezes them. Default: as ``lr``."""
    lr_new: float | None
    """Peak learning rate of the operator's own new weights. Default: 10 times ``lr``."""
    weight_decay: float
    """AdamW weight decay, on matrices only."""

    def at_width(self, rate: float, width: int) -> Stage:
        """Every rate filled in, for a model ``width`` wide; ``rate`` is the stage's ``lr`` at 384."""
        lr = rate * 384 / width if self.lr is None else self.lr
        lr_rest = lr if self.lr_rest is None else self.lr_rest
        return dataclasses.replace(self, lr=lr, lr_rest=lr_rest, lr_new=10 * lr if self.lr_new is None else self.lr_new)


ATTENTION_STAGE = Stage(share=0.3, losses={"site_output": 1.0}, lr=None, lr_rest=0.0, lr_new=None, weight_decay=0.0)
FEATURE_STAGE = Stage(
    share=0.7,
    losses={"feature": 1.0, "site_output": 0.1, "logits": 1.0},
    lr=None,
    lr_rest=None,
    lr_new=None,
    weight_decay=0.01,
)
# Only where the user asks for it: it needs labels. The paper's loss (arXiv 2609.35745, section 3).
TASK_STAGE = Stage(
    share=0.0, losses={"labels": 1.0, "site_mse": 50.0}, lr=None, lr_rest=None, lr_new=None, weight_decay=0.05
)


@dataclass(frozen=True)
class Calibration:
    """``[distill.calibration]``: the closed form, without any training."""

    images: int | None = None
    """Training images that are read once; a fifth of them (at most 64) only judges. 0: no calibration. Default: 512
    where nothing is trained (``distill.steps = 0``), otherwise 0: training from the copied weights ends better."""
    ridges: tuple[float, ...] = (1e-3, 1e-1, 1.0)
    """Pulls towards the copied weights that are tried at every layer, in units of the inputs' mean variance."""
    before: tuple[Literal["attention", "feature"], ...] = ("attention",)
    """The stages before which it runs, even one of no steps: before ``attention`` it fits the copied model, before
    ``feature`` what stage ``attention`` has left."""


@dataclass(frozen=True)
class DistillOptions:
    """``[distill]``: recovering the attention from the source, label-free."""

    steps: int | None = None
    """Optimiser steps of all stages together; default: 300 for ``demo``, otherwise 2,000. 0 converts only."""
    batch_size: int = 64
    """Images in one optimiser step, over all processes."""
    grad_accum_steps: int = 1
    """The images of a step go through in so many parts, one after the other; their gradients add up."""
    warmup: float = 0.05
    """Share of each stage's steps spent on linear warm-up."""
    clip: float = 1.0
    """Largest gradient norm."""
    augment: Literal["flip", "mild", "none"] = "flip"
    """``flip``: the evaluation view or its mirror image; ``mild``: random resized crop (scale 0.7-1) and horizontal
    flip; ``none``: the evaluation view."""
    temperature: float = 2.0
    """Of the loss ``logits``."""
    label_smoothing: float = 0.1
    """Of the loss ``labels``."""
    ema: float = 0.0
    """Decay of the averaged weights in stages ``feature`` and ``task``, which are kept where their loss on training
    images in the evaluation view is the lower one; 0: no average."""
    calibration: Calibration = Calibration()
    attention: Stage = ATTENTION_STAGE
    feature: Stage = FEATURE_STAGE
    task: Stage = TASK_STAGE

    @property
    def stages(self) -> dict[str, Stage]:
        """The stages by name, in their order."""
        return {"attention": self.attention, "feature": self.feature, "task": self.task}

    def at_width(self, width: int) -> DistillOptions:
        """Every learning rate filled in, for a model ``width`` wide."""
        attention, feature = self.attention.at_width(1e-3, width), self.feature.at_width(3e-4, width)
        return dataclasses.replace(self, attention=attention, feature=feature, task=self.task.at_width(3e-4, width))


@dataclass(frozen=True)
class DataOptions:
    """``[data]``: the images."""

    path: str | tuple[str, ...] | None = None
    """Folder, archive, tables, pattern of them, or ``datasets`` id, or an array of several, which are mixed; default:
    the demo's images for ``demo``, otherwise ``timm/mini-imagenet``."""
    split: str | None = None
    """Split to learn from; default: ``train``, or all images."""
    val_split: str | None = None
    """Split to judge by; default: ``validation``, ``val`` or ``test``, or 5% of the images, held out."""
    class_map: str | None = None
    """JSON or TOML file with the model's index or label for each class of the images, or a text with a class a line in
    the model's order."""
    streaming: bool = True
    """Read a set on the Hub while it is fetched; ``false`` fetches it whole first."""
    workers: int = 2
    """Loader processes."""
    eval_samples: int | None = None
    """Evaluate at most so many images; default: all."""
    max_bad: float = 0.01
    """Share of the images that may be unreadable: they are left out, counted and named; above it the run stops with
    their list. 0 stops at the first."""


@dataclass(frozen=True)
class OutputOptions:
    """``[output]``: the artifact."""

    dir: str | None = None
    """Folder to write; default ``<model>-<op>``."""
    license: str | None = None
    """Licence of the source where it does not state one itself; another than it states is an error."""
    bench: bool = True
    """Measure the speed of both models when all is done, at the model's own size and, for a few seconds, at larger
    ones."""


@dataclass(frozen=True)
class RunOptions:
    """``[run]``: how to run."""

    seed: int = 0
    """Of everything random; the same seed gives the same weights on the same machine."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """``auto`` is what accelerate finds."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Autocast type; ``no`` is float32 throughout, ``auto`` is bf16 on a GPU that has it, otherwise none."""
    grad_checkpointing: bool = False
    """Blocks are computed again in the backward pass instead of kept, where timm can do that: less memory, more time.
    Stage ``attention`` never keeps more than one site."""
    compile: bool = False
    """torch.compile the sites and the MLPs of both models while a stage runs; not with losses that compare maps."""
    track: tuple[str, ...] = ()
    """Trackers that get what ``metrics.jsonl`` gets: ``tensorboard``, ``wandb`` and others that accelerate knows."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; default: as many as take about 10 minutes."""


@dataclass(frozen=True)
class Recipe:
    """The whole request."""

    keep_softmax: int = 0
    """So many sites keep the softmax: those whose conversion costs most, found by measuring on training images. The
    recipe that is written beside the weights names them in a rule instead."""
    source: SourceOptions = SourceOptions()
    convert: tuple[Rule, ...] = (Rule(),)
    distill: DistillOptions = DistillOptions()
    data: DataOptions = DataOptions()
    output: OutputOptions = OutputOptions()
    run: RunOptions = RunOptions()

    def check(self) -> Recipe:
        """Return self, or raise ``RecipeError`` naming every value out of range."""
        d, problems = self.distill, []
        if not self.source.model:
            problems.append("source.model: name a model, such as 'demo' or 'google/vit-base-patch16-224'")
        sides = self.source.img_size
        if isinstance(sides, tuple) and len(sides) != 2:
            problems.append(f"source.img_size: {list(sides)} is not a side, or height and width")
        ranges = [
            ("keep_softmax", self.keep_softmax, 0, None),
            *(("source.img_size", side, 1, 16_384) for side in (sides if isinstance(sides, tuple) else [sides])),
            ("distill.steps", d.steps, 0, None),
            ("distill.batch_size", d.batch_size, 1, None),
            ("distill.grad_accum_steps", d.grad_accum_steps, 1, None),
            ("distill.warmup", d.warmup, 0, 1),
            ("distill.clip", d.clip, 1e-12, None),
            ("distill.temperature", d.temperature, 1e-12, None),
            ("distill.label_smoothing", d.label_smoothing, 0, 1),
            ("distill.ema", d.ema, 0, 1),
            ("distill.calibration.images", d.calibration.images, 0, None),
            ("distill.calibration.ridges", min(d.calibration.ridges, default=0), 1e-12, None),
            ("data.workers", self.data.workers, 0, None),
            ("data.eval_samples", self.data.eval_samples, 1, None),
            ("data.max_bad", self.data.max_bad, 0, 1),
            ("run.seed", self.run.seed, 0, 2**32 - 1),
            ("run.checkpoint_every", self.run.checkpoint_every, 1, None),
        ]
        for name, stage in d.stages.items():
            ranges += [
                (f"distill.{name}.{key}", getattr(stage, key), 0, 1 if key == "share" else None)
                for key in ("share", "lr", "lr_rest", "lr_new", "weight_decay")
            ]
        for key, value, low, high in ranges:
            if value is not None and (value < low or (high is not None and value > high)):
                wanted = f"at least {low}" if high is None else f"between {low} and {high}"
                problems.append(f"{key}: {value} is out of range, must be {wanted}")
        if sum(stage.share for stage in d.stages.values()) <= 0:
            problems.append("distill: the shares of the stages are all 0")
        paths = self.data.path if isinstance(self.data.path, tuple) else ()
        if self.data.path in ("", ()) or "" in paths or len({*paths}) < len(paths):
            problems.append(f"data.path: {self.data.path!r} names nothing, or a set twice")
        if self.data.split is not None and self.data.split == self.data.val_split:
            problems.append(
                f"data.val_split: {self.data.split!r} is data.split as well; they are never the same images"
            )
        if not self.convert:
            problems.append("convert: at least one rule is needed")
        for i, rule in enumerate(self.convert):
            if rule.op != KEEP:
                try:
                    OPERATORS.check(rule.op)
                except Vit2LinearError as error:
                    problems.append(f"convert.{i}.op: {error}")
        raise_all(problems, "recipe")
        return self


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a TOML file, not yet checked for ranges (flags may still complete it)."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {str(path)!r}: {error}.") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, where: str = "recipe") -> Recipe:
    """The recipe in a TOML text; every unknown key and wrong type is reported together."""
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))  # the byte order mark of some editors
    except ValueError as error:  # TOMLDecodeError, and numbers of more digits than Python reads
        raise RecipeError(f"{where}: not valid TOML: {error}.") from error
    except RecursionError:
        raise RecipeError(f"{where}: not valid TOML: nested without end.") from None
    if (problem := malformed(table)) is not None:
        raise RecipeError(f"{where}: {problem}.")
    return build(Recipe, table, Recipe(), where)


def to_toml(recipe: Recipe) -> str:
    """The recipe as TOML; unset values are left out."""
    import tomli_w

    return tomli_w.dumps(_plain(dataclasses.asdict(recipe)))


def override(recipe: Recipe, **values: Any) -> Recipe:
    """A copy with dotted keys replaced, written with ``__`` for the dot; ``None`` leaves a value as it is.

    Raises:
        RecipeError: a value of the wrong type.
    """
    table: dict[str, Any] = {}
    for key, value in values.items():
        if value is not None:
            *path, name = key.split("__")
            node = table
            for part in path:
                node = node.setdefault(part, {})
            node[name] = value
    return build(Recipe, table, recipe, "recipe")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
