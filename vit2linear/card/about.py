"""The sections on what the model is: source and operators, how to load it, recipe, data, licence, citation."""

from __future__ import annotations

import re

from vit2linear.card.markdown import Record, bullets, images, last_name, paths, table
from vit2linear.distill.stages import split_steps
from vit2linear.licence import names, words
from vit2linear.modifiers import Modifiers
from vit2linear.recipe import KEEP, OPERATORS, Recipe

METHOD = """@misc{copy-the-same-2026,
  title = {Copy the Same, Distill the Difference: Initializing Linear Vision Transformers},
  author = {Qin and Yang and Goenawan and others},
  year = {2026},
  eprint = {2609.35745},
  archivePrefix = {arXiv}
}"""


def summary(record: Record) -> str:
    """What was converted into what."""
    source, plan = record["source"], record["plan"]
    kept = [f"`{site['site']['path']}`" for site in plan if site["op"] == KEEP]
    commit = f" at commit `{source['commit']}`" if "repo" in source else ""
    used = {(site["op"], Modifiers(**site["modifiers"]).words) for site in plan if site["op"] != KEEP}
    papers = "; ".join(
        f"`{op}`{more}: {OPERATORS.get(op).summary} ({OPERATORS.get(op).reference})" for op, more in sorted(used)
    )
    return (
        f"{_source(source)}{commit} (`{source['architecture']}`) with the softmax of {len(plan) - len(kept)} of "
        f"{len(plan)} attention modules replaced by an operator of linear cost"
        f"{f' ({len(kept)} kept)' if kept else ''}, {record['start']['words']}, and {_training(record)}, "
        "by vit2linear.\n\n"
        f"Operators: {papers}.{' Softmax stays in ' + ', '.join(kept) + '.' if kept else ''}"
    )


def loading(record: Record, address: str) -> str:
    """Three ways, each of which is run by a test."""
    channels = record["input_size"][0]
    mode = "L" if channels == 1 else "RGB"
    classifies = record["evaluation"]["agreement"] is not None
    auto, output = ("AutoModelForImageClassification", "logits") if classifies else ("AutoModel", "last_hidden_state")
    return f"""Each of these needs `pip install vit2linear`, and the import, which makes the architecture known.
Without it loading fails with "Unknown model"; it never falls back to softmax.

With timm:

```python
import timm
import torch
import vit2linear
from PIL import Image

model = timm.create_model("hf-hub:{address}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = Image.open("image.jpg").convert("{mode}")
with torch.inference_mode():
    output = model(transform(image).unsqueeze(0))
```

With transformers:

```python
import torch
import vit2linear
from PIL import Image
from transformers import AutoImageProcessor, {auto}

model = {auto}.from_pretrained("{address}").eval()
processor = AutoImageProcessor.from_pretrained("{address}")
image = Image.open("image.jpg").convert("{mode}")
with torch.inference_mode():
    output = model(**processor(image, return_tensors="pt")).{output}
```

By itself, with the images preprocessed as for timm:

```python
import torch
import vit2linear

model = vit2linear.load("{address}")
with torch.inference_mode():
    output = model(torch.zeros(1, {", ".join(map(str, record["input_size"]))}))
```"""


def losses(record: Record) -> str:
    """What of the source's attention the operators do not carry, as the user accepted it; and windows."""
    return bullets(record["notes"])


def settings(record: Record, recipe: Recipe) -> str:
    """The settings that matter most, and where all of them are."""
    options, start = recipe.distill, record["start"]
    rules = [
        f"`{rule.op}`{Modifiers(rule.local, rule.center_keys).words}"
        + (f" {rule.options}" if rule.options else "")
        + (f" at `{rule.sites}`" if rule.sites != "*" else "")
        for rule in recipe.convert
    ]
    rows = [["operators", "; ".join(rules)], ["start", start["words"]]]
    fitted = {moment: c["images"] for moment, c in record["calibration"].items()}
    rows += [[moment, f"{count:,} images"] for moment, count in fitted.items()]
    done = {stage["stage"]: stage for stage in record["stages"]}
    for name, steps in split_steps(options, options.steps or 0).items():
        if name in done:
            stage = options.stages[name]
            rates = " / ".join(f"{rate:.3g}" for rate in (stage.lr, stage.lr_rest, stage.lr_new) if rate is not None)
            losses = ", ".join(f"{weight:g} `{loss}`" for loss, weight in done[name]["objective"].items())
            rows.append([f"stage `{name}`", f"{steps:,} steps; {losses}; rates {rates} (attention / rest / new)"])
    if done:
        rows.append(["images of a step", f"{options.batch_size}, augmentation `{options.augment}`"])
    rows.append(["seed, precision", f"{recipe.run.seed}, {recipe.run.mixed_precision}"])
    return (
        f"{table(['', ''], rows)}\n\n`recipe.toml` holds the whole of it (`vit2linear convert --recipe recipe.toml`), "
        "`report.json` the record: source, plan, audit of every weight, losses, versions."
    )


def data(record: Record) -> str:
    """What it was distilled on and judged by."""
    used = record["data"]
    sets = [
        f"[{path}](https://huggingface.co/datasets/{path})" if path in used["on_hub"] else f"`{last_name(path)}`"
        for path in paths(record)
    ]
    parts = [f"Images for {_purpose(record)} are of {' and '.join(sets)}; {images(record)} judged the result."]
    if used["held_out"]:
        parts.append("The images that judged, 5% by their content, were used for nothing else.")
    if used["bad"]["count"]:
        parts.append(f"{used['bad']['count']:,} images could not be read and were left out.")
    return " ".join(parts)


def licence(record: Record) -> str:
    """The source's, which converted weights keep."""
    source = record["source"]
    if not names(source):
        return "The original states no licence, so it is not known what these weights may be used for."
    link = source.get("license_link")
    name = f"[{words(source)}]({link})" if link else words(source)
    return f"That of the original, {name}."


def citation(record: Record) -> str:
    """BibTeX of the method and of the operators."""
    entries = [METHOD]
    for op in sorted({site["op"] for site in record["plan"]} - {KEEP}):
        for title, number in re.findall(r"([^;]+), arXiv (\d{4}\.\d{4,5})", OPERATORS.get(op).reference):
            entries.append(
                f"@misc{{{op.split(':')[-1]}-{number},\n  title = {{{title.strip()}}},\n  year = {{20{number[:2]}}},\n"
                f"  eprint = {{{number}}},\n  archivePrefix = {{arXiv}}\n}}"
            )
    return "```bibtex\n" + "\n\n".join(entries) + "\n```"


def _source(source: Record) -> str:
    return (
        f"[{source['repo']}](https://huggingface.co/{source['repo']})"
        if "repo" in source
        else f"`{last_name(source['name'])}`"
    )


def _training(record: Record) -> str:
    """What was done to the weights."""
    fitted = [c["images"] for c in record["calibration"].values()]
    parts = [f"calibrated in closed form on {max(fitted):,} images"] if fitted else []
    for labelled, how in ((False, "distilled label-free from it"), (True, "trained with labels beside it")):
        steps = [
            f"{s['steps']:,} steps of stage `{s['stage']}` ({s['images']:,} images)"
            for s in record["stages"]
            if ("labels" in s["objective"]) == labelled
        ]
        parts += [f"{how}: {', then '.join(steps)}"] if steps else []
    return ", ".join(parts if record["stages"] else [*parts, "not trained"])


def _purpose(record: Record) -> str:
    return "distillation" if record["stages"] else "calibration" if record["calibration"] else "comparison"
