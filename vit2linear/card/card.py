"""The model card: from the record of a conversion and its recipe, nothing typed by hand.

``render`` needs no more than ``report.json`` and ``recipe.toml`` hold, so a card can be written again at any time.
"""

from __future__ import annotations

import math

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from vit2linear.card import about, measured
from vit2linear.card.markdown import Record, images
from vit2linear.recipe import KEEP, Recipe


def render(name: str, record: Record, recipe: Recipe, repo: str | None = None) -> str:
    """The card's text, front matter included.

    Args:
        name: of the model.
        record: of its conversion.
        recipe: the effective one.
        repo: where it is published; default: ``OWNER/NAME``, to be replaced.
    """
    address = repo or f"OWNER/{name}"
    sections = {
        "How to load it": about.loading(record, address),
        "What the conversion gives up": about.losses(record),
        "What was lost and won": measured.results(record),
        "Speed against resolution": measured.speed(record),
        "Limits": measured.limits(record),
        "Recipe": about.settings(record, recipe),
        "Data": about.data(record),
        "Licence": about.licence(record),
        "Citation": about.citation(record),
    }
    body = "\n".join(f"## {title}\n\n{section}\n" for title, section in sections.items() if section)
    head = front_matter(name, record).to_yaml()
    return str(ModelCard(f"---\n{head}\n---\n\n# {name}\n\n{about.summary(record)}\n\n{body}"))


def front_matter(name: str, record: Record) -> ModelCardData:
    """What the Hub reads: licence, task, base model, data, results."""
    source, results = record["source"], _results(record)
    operators = sorted({site["op"] for site in record["plan"]} - {KEEP})
    return ModelCardData(
        **{key: source[key] for key in ("license", "license_name", "license_link") if source.get(key)},
        # Not timm: the Hub would then show a way to load it that lacks `import vit2linear`, and fails.
        library_name="vit2linear",
        pipeline_tag=_task(record),
        tags=["vit2linear", "linear-attention", *operators, "timm"],
        base_model=source.get("repo"),
        base_model_relation="finetune" if source.get("repo") else None,
        datasets=record["data"]["on_hub"] or None,
        metrics=["accuracy"] if results else None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def _task(record: Record) -> str:
    return "image-feature-extraction" if record["evaluation"]["agreement"] is None else "image-classification"


def _results(record: Record) -> list[EvalResult]:
    """Accuracies of the student as shares, in Python's own numbers: others would become tags of Python objects."""
    student, ids = record["evaluation"]["student"], record["data"]["on_hub"]
    return [
        EvalResult(
            task_type=_task(record),
            dataset_type=ids[0] if len(ids) == 1 else "imagefolder",
            dataset_name=images(record),
            metric_type="accuracy",
            metric_name=title,
            metric_value=round(float(student[key]) / 100, 4),
        )
        for key, title in (("top1", "top-1"), ("top5", "top-5"), ("knn", "10-NN"), ("probe", "ridge probe"))
        if student[key] is not None and math.isfinite(student[key])
    ]
