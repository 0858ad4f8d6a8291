"""What becomes of every timm name of the covered modules; ``python -m tests.coverage`` writes docs/coverage.md.

A name counts as converted only if its own plan is made at full size (on the meta device), and its small sibling (same
classes, few blocks, narrow) ran forward converted, was saved, and was read back through timm with equal outputs.
"""

from __future__ import annotations

import importlib
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._registry import _model_to_module
from torch import Tensor

from tests import families
from vit2linear.errors import Vit2LinearError
from vit2linear.plan import make_plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import Rule
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"
HEAD = """# Coverage

Every architecture of timm {version} in the modules below, and what `vit2linear convert --op relu` makes of it. "With a
stated loss" means that the source's attention has something that `relu` cannot carry, which the plan names and which is
accepted with `--drop`; other operators may carry it. The page is written by `python -m tests.coverage` and checked by a
test. A name counts as converted only if its plan is made at full size, and a small sibling of it (same classes, few
blocks, narrow) runs converted, is saved, and is read back through timm with equal outputs.
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one name."""

    name: str
    module: str
    sites: int
    losses: tuple[str, ...] = ()
    reason: str | None = None
    """Why it is refused."""

    @property
    def verdict(self) -> str:
        if self.reason is not None:
            return "refused"
        return "with a stated loss" if self.losses else "converted"


def names() -> list[str]:
    """Every name of the covered modules."""
    return [name for name in timm.list_models() if _model_to_module[name] in families.MODULES]


def outcome(name: str) -> Outcome:
    """Plan at full size, then convert, run, save and reload the small sibling."""
    module = _model_to_module[name]
    with torch.device("meta"):
        full = timm.create_model(name)
    try:
        plan = make_plan(full, [Rule(drop=("all",))])
    except Vit2LinearError as error:
        return Outcome(name, module, 0, reason=str(error).splitlines()[0])
    small = families.build(name, **importlib.import_module(f"tests.families.{module}").small(name))
    its_plan = make_plan(small, [Rule(drop=("all",))])
    kinds = [{s.site.kind for s in p.replaced} for p in (plan, its_plan)]
    assert kinds[0] == kinds[1] and plan.losses.keys() == its_plan.losses.keys(), f"{name}: the sibling is none"
    student = apply_plan(small, its_plan).eval()
    pixels = torch.randn(example_pixels(student).shape, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        wanted = tensors(student(pixels))
        timm.models.save_for_hf(student, folder, safe_serialization=True)
        again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        found = tensors(again(pixels))
    assert sites_of(again) and all(t.isfinite().all() for t in wanted)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), f"{name}: another model was read back"
    return Outcome(name, module, len(plan.replaced), tuple(sorted(plan.losses)))


def tensors(output: Any) -> list[Tensor]:
    """The output of any model as tensors."""
    if isinstance(output, dict):
        output = [v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point()]
    return [output] if isinstance(output, Tensor) else [t for part in output for t in tensors(part)]


def page(found: list[Outcome]) -> str:
    """docs/coverage.md."""
    verdicts = ("converted", "with a stated loss", "refused")
    lines = [HEAD.format(version=timm.__version__)]
    lines += [f"| module | names | {' | '.join(verdicts)} | losses |", "|---|---|---|---|---|---|"]
    for module in [*families.MODULES, "all"]:
        of = [f for f in found if module in (f.module, "all")]
        counts = Counter(f.verdict for f in of)
        losses = "" if module == "all" else ", ".join(sorted({f"`{name}`" for f in of for name in f.losses}))
        lines.append(f"| {module} | {len(of)} | {' | '.join(str(counts[v]) for v in verdicts)} | {losses} |")
    refused = [f for f in found if f.reason is not None]
    if refused:
        lines += ["", "## Refused", "", "| name | reason |", "|---|---|"]
        lines += [f"| `{f.name}` | {f.reason} |" for f in refused]
    lines += ["", "## Every name", "", "| name | sites | verdict |", "|---|---|---|"]
    for f in found:
        verdict = f.verdict if not f.losses else f"without {', '.join(f.losses)}"
        lines.append(f"| `{f.name}` | {f.sites} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([outcome(name) for name in names()]), "utf-8")
