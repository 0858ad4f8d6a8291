"""``report.html``: one page that can be sent to a colleague; no network, no script, every figure from the record."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from vit2linear.compare import SAME, SCORES

_SCORES = {key: (title, ".2f") for key, title in SCORES.items()} | {
    "calibration_error": ("calibration error, %", ".2f"),
    "images_per_second": ("images/s", ".1f"),
}
_PAIRED = SAME | {"speedup": ("speed over teacher", ".2f")}


def render(name: str, record: Mapping[str, Any], recipe: str, pictures: Mapping[str, bytes]) -> str:
    """The page of an artifact.

    Args:
        name: of the artifact.
        record: ``report.json``.
        recipe: the effective recipe, TOML.
        pictures: PNG by name: ``speed``, ``losses``, ``errors``, ``routing``, ``attention``, ``examples``, as far as
            there are any.
    """
    template = files("vit2linear").joinpath("page.html").read_text("utf-8")
    evaluation = record["evaluation"]
    key, title = next(
        ((k, t) for k, t in SCORES.items() if evaluation["student"].get(k) is not None),
        ("images_per_second", "images/s"),
    )
    parts = (("results", "Results"), ("speed", "Speed"), ("training", "Training"), ("routing", "Token routing"))
    shown = {"results": True, "speed": "speed" in pictures, "training": bool({"losses", "errors"} & pictures.keys())}
    shown |= {"routing": bool({"routing", "attention"} & pictures.keys()), "images": "examples" in pictures}
    routing = record.get("routing") or {}
    return (
        Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        .from_string(template)
        .render(
            name=name,
            record=record,
            recipe=recipe,
            pictures={k: base64.b64encode(v).decode() for k, v in pictures.items()},
            verdict=verdict(record),
            data=evaluation["data"],
            sections=[p for p in (*parts, ("images", "Images"), ("record", "Record")) if shown.get(p[0], True)],
            results=_results(evaluation),
            score=title,
            moments=[[h["moment"], h["images"], _form(h["student"].get(key), ".2f")] for h in record["history"]],
            lost=[
                [c["name"], c["images"], _form(c["teacher"], ".1f"), _form(c["student"], ".1f")]
                for c in evaluation.get("lost_classes", ())
            ],
            routing=[[path, *_site_routing(site["heads"])] for path, site in routing.items()],
            looked=record.get("looked_at", 0),
            sites=_sites(record),
            audit=[
                [kind, len(keys) if isinstance(keys, list | tuple) else keys] for kind, keys in record["audit"].items()
            ],
            versions=[[k, v] for k, v in {**record["versions"], **record["source"]}.items()],
        )
    )


def verdict(record: Mapping[str, Any]) -> str:
    """Whether the one can take the other's place, in a sentence or two; nothing that was not measured."""
    e = record["evaluation"]
    sites = len([s for s in record["plan"] if s["op"] not in ("keep", "softmax")])
    start = f"{sites} of {len(record['plan'])} attention modules route tokens in linear time"
    t, s = e["teacher"], e["student"]
    if e.get("difference"):
        d = e["difference"]
        noise = d["p_value"] >= 0.05
        change = f"top-1 is {s['top1']:.2f}% instead of {t['top1']:.2f}% ({d['points']:+.2f} points, "
        change += f"95% interval {d['low']:+.2f} to {d['high']:+.2f}"
        change += "; no more than chance explains on so many images)" if noise else ")"
    elif s.get("knn") is not None:
        change = f"10-NN accuracy is {s['knn']:.2f}% instead of {t['knn']:.2f}%"
    elif e["agreement"] is not None:
        change = f"both models name the same class on {e['agreement']:.2f}% of the images"
    else:
        change = f"the cosine between both models' features is {e['feature_cosine']:.3f}"
    speed = f"in the batches of this evaluation it ran at {e['speedup']:.2f} times the teacher's speed"
    trained = "" if record["stages"] or record["calibration"] else " Nothing was trained."
    return f"{start}; {change}; {speed}.{trained}"


def _form(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _results(e: Mapping[str, Any]) -> list[list[str]]:
    rows = [[t, _form(e["teacher"].get(k), f), _form(e["student"].get(k), f)] for k, (t, f) in _SCORES.items()]
    rows += [[title, "", _form(e.get(key), form)] for key, (title, form) in _PAIRED.items()]
    return [row for row in rows if row[-1]]


def _site_routing(heads: Sequence[Mapping[str, Any]]) -> list[str]:
    means = (sum(head[k] for head in heads) / len(heads) for k in ("cosine", "overlap", "rank", "teacher_rank"))
    return [f"{mean:.2f}" for mean in means]


def _sites(record: Mapping[str, Any]) -> list[list[str]]:
    errors = record["evaluation"]["site_errors"]
    rows = []
    for site in record["plan"]:
        path = site["site"]["path"]
        rows.append([path, site["op"], site.get("evaluation", ""), _form(errors.get(path), ".4f")])
    return rows
