"""The model card: built from what the code knows, nothing typed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from vit2linear.compare import EvalReport
from vit2linear.plan import Plan, plan_notes
from vit2linear.recipe import KEEP, OPERATORS
from vit2linear.sources.base import ModelRef

_HUB_LICENSES = {
    "apache-2.0",
    "mit",
    "bsd-3-clause",
    "cc-by-4.0",
    "cc-by-sa-4.0",
    "cc-by-nc-4.0",
    "cc-by-nc-sa-4.0",
    "cc0-1.0",
    "apple-ascl",
    "apple-amlr",
    "openrail",
    "other",
}


def license_of(ref: ModelRef, pretrained_cfg: dict[str, Any], given: str | None) -> dict[str, Any]:
    """Licence fields for the card: the source's own; never a default.

    Order: the repository's card, the folder's card, timm's record, then what the user stated. Names that the Hub does
    not list become ``other`` with a name.
    """
    if ref.repo is not None and ref.repo.license:
        fields = {k: getattr(ref.repo, k) for k in ("license", "license_name", "license_link")}
        return {k: str(v) for k, v in fields.items() if v}
    card = ref.folder / "README.md" if ref.folder is not None else None
    name = (_stated(card) if card is not None else None) or pretrained_cfg.get("license") or given or "unknown"
    return {"license": name} if name in _HUB_LICENSES else {"license": "other", "license_name": str(name)}


def _stated(card: Path) -> str | None:
    """What a folder's card states; one that cannot be read states nothing, and some state a list."""
    try:
        stated = ModelCard.load(card).data.get("license") if card.is_file() else None
    except Exception:  # the YAML parser's own errors, whose package is not ours to name
        return None
    first = stated[0] if isinstance(stated, list) and stated else stated
    return first if isinstance(first, str) else None


def render(
    name: str,
    ref: ModelRef,
    licence: dict[str, Any],
    plan: Plan,
    stages: Sequence[dict[str, Any]],
    report: EvalReport,
    start: str,
    calibrated: Sequence[int],
) -> str:
    """The card's text, front matter included.

    ``stages`` are the record's, ``start`` says what was copied, ``calibrated`` on how many images.
    """
    operators = sorted({s.op for s in plan.replaced})
    headless = report.agreement is None
    data = ModelCardData(
        **licence,
        library_name="timm",
        pipeline_tag="image-feature-extraction" if headless else "image-classification",
        tags=["vit2linear", "linear-attention", *operators],
        base_model=ref.repo.repo if ref.repo is not None else None,
        base_model_relation="finetune" if ref.repo is not None else None,
        model_name=name if report.student.top1 is not None else None,
        eval_results=_results(report),
    )
    source = f"[{ref.repo.repo}](https://huggingface.co/{ref.repo.repo})" if ref.repo else f"`{Path(ref.name).name}`"
    commit = f" at commit `{ref.repo.commit}`" if ref.repo is not None else ""
    kept = [f"`{s.site.path}`" for s in plan.sites if s.op == KEEP]
    used = sorted({(s.op, s.modifiers.words) for s in plan.replaced})
    papers = "; ".join(
        f"`{op}`{more}: {OPERATORS.get(op).summary} ({OPERATORS.get(op).reference})" for op, more in used
    )
    text = f"""
# {name}

{source}{commit} with the softmax of {len(plan.replaced)} of {len(plan.sites)} attention modules replaced by an \
operator of linear cost{f" ({len(kept)} kept)" if kept else ""}, {start}, and {_training(stages, calibrated)}.

Operators: {papers}.{f" Softmax stays in {', '.join(kept)}." if kept else ""}

## Use

```python
import timm
import vit2linear  # makes timm know this architecture: pip install vit2linear

model = timm.create_model("hf-hub:OWNER/{name}", pretrained=True).eval()
```

Without `import vit2linear` loading fails with "Unknown model"; it never falls back to softmax.

{_losses(plan)}## What was lost and won

Measured on {report.data}, {report.images:,} images, both models in the same run.

{_table(report)}

Timings are from the machine of the conversion; measure your own with `vit2linear eval`.

## Reproduce

`recipe.toml` holds the effective recipe (`vit2linear convert --recipe recipe.toml`), `report.json` the full
record: source, plan, audit of every weight, losses, versions.
The method is "Copy the Same, Distill the Difference", arXiv 2609.35745.
"""
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n{text}"))


def _training(stages: Sequence[dict[str, Any]], calibrated: Sequence[int]) -> str:
    """What was done to the weights."""
    parts = [f"calibrated in closed form on {max(calibrated):,} images"] if calibrated else []
    for labelled, how in ((False, "distilled label-free from it"), (True, "trained with labels beside it")):
        steps = [
            f"{s['steps']:,} steps of stage `{s['stage']}` ({s['images']:,} images)"
            for s in stages
            if ("labels" in s["objective"]) == labelled
        ]
        parts += [f"{how}: {', then '.join(steps)}"] if steps else []
    return ", ".join(parts if stages else [*parts, "not trained"])


def _losses(plan: Plan) -> str:
    """What of the source's attention the operators do not carry, as the user accepted it; and windows."""
    notes = plan_notes(plan)
    return "## What the conversion gives up\n\n" + "".join(f"- {note}\n" for note in notes) + "\n" if notes else ""


def _table(report: EvalReport) -> str:
    t, s = report.teacher, report.student
    rows: list[tuple[str, float | None, float | None, str]] = [
        ("top-1, %", t.top1, s.top1, ".2f"),
        ("top-5, %", t.top5, s.top5, ".2f"),
        ("10-NN, %", t.knn, s.knn, ".2f"),
        ("ridge probe, %", t.probe, s.probe, ".2f"),
        ("images/s", t.images_per_second, s.images_per_second, ".1f"),
    ]
    lines = ["| | softmax original | this model |", "|---|---|---|"]
    for title, a, b, form in rows:
        if a is not None and b is not None:
            lines.append(f"| {title} | {a:{form}} | {b:{form}} |")
    pairs: list[tuple[str, float | None, str]] = [
        ("same first class, %", report.agreement, ".2f"),
        ("same 10 neighbours, %", report.neighbour_agreement, ".2f"),
        ("cosine of features", report.feature_cosine, ".4f"),
    ]
    lines += [f"| {title} | | {value:{form}} |" for title, value, form in pairs if value is not None]
    return "\n".join(lines)


def _results(report: EvalReport) -> list[EvalResult] | None:
    if report.student.top1 is None:
        return None
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type="image-folder",
            dataset_name=report.data,
            metric_type="accuracy",
            metric_name="top-1",
            metric_value=round(report.student.top1 / 100, 4),
        )
    ]
