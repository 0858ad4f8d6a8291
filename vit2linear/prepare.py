"""Everything that is known of a conversion before a weight is read: what ``--dry-run`` shows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import resolve_model_data_config

from vit2linear import artifact, hybrid, model
from vit2linear.class_map import ClassMap, read_class_map
from vit2linear.distill.economies import check_economies
from vit2linear.distill.stages import check_stages
from vit2linear.evaluation import default_images
from vit2linear.images import DEFAULT_NOTE
from vit2linear.initial import copied_keys, start_words
from vit2linear.licence import Licence, of_source
from vit2linear.plan import Plan, make_plan, plan_notes
from vit2linear.probe import Probe, probe
from vit2linear.recipe import OPERATORS, Recipe, override
from vit2linear.resolve import DEMO, layout_of, resolve
from vit2linear.sources.base import ModelRef, ModelSpec
from vit2linear.trackers import check_trackers

CALIBRATION_IMAGES = 512
"""Read by the closed form where nothing is trained."""


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a weight is read: what ``--dry-run`` shows."""

    recipe: Recipe
    """Effective: source, output and steps filled in."""
    ref: ModelRef
    spec: ModelSpec
    licence: Licence
    plan: Plan
    probe: Probe
    parameters: int
    num_classes: int
    class_map: ClassMap | None
    data_config: dict[str, Any]
    notes: tuple[str, ...]

    @property
    def output(self) -> Path:
        """The folder to write."""
        return Path(self.recipe.output.dir or "")

    def replanned(self, recipe: Recipe) -> Prepared:
        """The same source with other rules."""
        skeleton = model.skeleton(self.spec)
        plan = make_plan(skeleton, recipe.convert)
        return dataclasses.replace(self, recipe=recipe, plan=plan, probe=probe(skeleton, plan))


def prepare(recipe: Recipe, overwrite: bool = False) -> Prepared:
    """Resolve and plan; no weight file is opened.

    Raises:
        Vit2LinearError: whatever is wrong with recipe, output folder, source or rules, cheapest check first.
    """
    recipe.check()
    check_trackers(recipe.run.track)
    if recipe.output.dir is not None:
        artifact.check_output(Path(recipe.output.dir), overwrite)
    ref = resolve(recipe.source.model, recipe.source.revision, recipe.source.arch)
    spec = layout_of(ref).spec(ref)
    licence = of_source(ref, spec.pretrained_cfg, recipe.output.license)
    if recipe.source.size is not None:
        spec = model.at_size(spec, recipe.source.size)
    skeleton = model.skeleton(spec)
    plan = make_plan(skeleton, recipe.convert)
    copied = copied_keys(skeleton, plan, recipe.source)
    hybrid.check_keep(plan, recipe.keep_softmax)
    probed = probe(skeleton, plan)
    notes = [*spec.notes, *licence.notes, *plan_notes(plan)]
    if recipe.keep_softmax:
        n, k = len(plan.replaced), recipe.keep_softmax
        notes.append(f"the rules convert {n} sites; the {k} costliest, measured on images, keep the softmax")
    headless = not skeleton.num_classes
    if len(copied) < len(skeleton.state_dict()):
        notes.append(f"start of the student: {start_words(recipe.source, headless)}")
    used = [OPERATORS.get(s.op) for s in plan.replaced]
    stages = check_stages(recipe.distill, used, int(skeleton.num_classes))  # type: ignore[arg-type]
    check_economies(skeleton, recipe.run, stages)
    if stages != recipe.distill:
        notes.append("the model has no class head: the loss 'logits' is left out")
        recipe = dataclasses.replace(recipe, distill=stages)
    class_map = None
    if recipe.data.class_map is not None:
        labels = spec.pretrained_cfg.get("label_names")
        class_map = read_class_map(recipe.data.class_map, labels, int(skeleton.num_classes))  # type: ignore[arg-type]
    if recipe.data.path is None and ref.name != DEMO:
        notes.append(DEFAULT_NOTE)
    steps = recipe.distill.steps if recipe.distill.steps is not None else 300 if ref.name == DEMO else 2000
    calibrated = recipe.distill.calibration.images
    recipe = override(
        recipe,
        output__dir=recipe.output.dir or _default_output(ref, plan),
        distill__steps=steps,
        distill__calibration__images=calibrated if calibrated is not None else 0 if steps else CALIBRATION_IMAGES,
        data__path=recipe.data.path or default_images(ref.name),
    )
    width = max(s.site.geometry.width for s in plan.sites)  # that of the last stage, where there are stages
    recipe = dataclasses.replace(recipe, distill=recipe.distill.at_width(width))
    reads = [path for path in (ref.folder, Path(str(recipe.data.path))) if path is not None and str(path) != DEMO]
    artifact.check_output(Path(str(recipe.output.dir)), overwrite, reads)
    data_config = resolve_model_data_config(skeleton)
    data_config["input_size"] = model.input_size(skeleton)
    parameters = sum(p.numel() for p in skeleton.parameters())
    classes = int(skeleton.num_classes)  # type: ignore[arg-type]
    return Prepared(recipe, ref, spec, licence, plan, probed, parameters, classes, class_map, data_config, tuple(notes))


def _default_output(ref: ModelRef, plan: Plan) -> str:
    """``<model>-<op>``, in the current folder."""
    name = ref.repo.repo if ref.repo is not None and ref.registry_name is None else ref.name
    operators = sorted({s.op for s in plan.replaced})
    short = [op.split(":")[-1].lower() for op in operators]
    path = Path(name.removeprefix("local-dir:")).resolve()
    return "-".join([path.stem if ref.weights_name is not None else path.name, *short])
