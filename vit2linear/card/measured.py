"""The sections on what the model can do: results, speed, limits."""

from __future__ import annotations

from vit2linear.artifact import SITES, SPEED
from vit2linear.card.markdown import Record, bullets, images, native, table
from vit2linear.compare import SAME, SCORES
from vit2linear.recipe import KEEP
from vit2linear.significance import Difference
from vit2linear.sizes import show_size
from vit2linear.speed import speed_of_record

_LISTED = 5


def results(record: Record) -> str:
    """Teacher and student, agreement, and the student from moment to moment."""
    evaluation, history = record["evaluation"], record["history"]
    teacher, student = evaluation["teacher"], evaluation["student"]
    rows = [
        [title, f"{teacher[key]:.2f}", f"{student[key]:.2f}"]
        for key, title in SCORES.items()
        if student[key] is not None
    ]
    rows += [
        [title, "", f"{evaluation[key]:{form}}"] for key, (title, form) in SAME.items() if evaluation[key] is not None
    ]
    parts = [
        f"Measured on {images(record)}, {evaluation['images']:,} images, both models in the same run.",
        table(["", "softmax original", "this model"], rows),
    ]
    if len(history) > 1:
        scores = [key for key in SCORES if student[key] is not None]
        same = [key for key in SAME if evaluation[key] is not None]
        moments = [
            [moment["moment"], f"{moment['images']:,}"]
            + [f"{moment['student'][key]:.2f}" for key in scores]
            + [f"{moment[key]:{SAME[key][1]}}" for key in same]
            for moment in history
        ]
        heads = ["this model", "images", *(SCORES[k] for k in scores), *(SAME[k][0] for k in same)]
        parts.append(table(heads, moments))
    if evaluation["site_errors"]:
        parts.append(
            f"![Error of every converted attention module]({SITES})\n\n"
            "Energy of the difference between a module's output and the original's, as a share of the output's energy, "
            "each model running on its own features: 0 is equal, 1 is as bad as an output of zero."
        )
    return "\n\n".join(parts)


def speed(record: Record) -> str:
    """Both models at a few sizes, on the machine of the conversion."""
    if not record.get("speed"):
        return ""
    found = speed_of_record(record["speed"])
    rows = [
        [
            show_size(p.size),
            f"{p.tokens:,}",
            *(f"{rate:.2f}" for rate in (p.softmax, p.student)),
            f"{p.speedup:.2f}x",
            f"{p.spread[0]:.2f}x to {p.spread[1]:.2f}x",
        ]
        for p in found.points
    ]
    heads = ["px", "tokens", "softmax original, images/s", "this model, images/s", "ratio", "middle half of the rounds"]
    picture = f"![Speed of both models against the image size]({SPEED})\n\n" if len(rows) > 1 else ""
    before, after = (record["flops"][key] / 1e9 for key in ("source", "student"))
    return (
        f"One image at a time in float32 on {found.device}, medians of interleaved rounds.\n\n"
        f"{table(heads, rows)}\n\n{picture}"
        f"One image of {native(record)} px takes {after:.3g} GFLOPs, {before:.3g} with softmax. Measure on your own "
        "machine, at your own sizes, with `vit2linear bench`."
    )


def limits(record: Record) -> str:
    """What the model is not, or was not seen to be."""
    evaluation = record["evaluation"]
    teacher, student = evaluation["teacher"], evaluation["student"]
    found = []
    if record.get("speed"):
        found.append(_where_faster(record))
    if evaluation["difference"] is not None:
        found.append(f"Top-1 against the original: {Difference(**evaluation['difference']).words}; one run, one seed.")
    elif student["knn"] is not None:
        found.append(f"10-NN against the original: {student['knn'] - teacher['knn']:+.2f} points; one run, one seed.")
    else:
        found.append("No accuracy was measured: that two models agree does not say that they are right.")
    lost = [f"`{c['name']}` {c['teacher']:.1f} to {c['student']:.1f}%" for c in evaluation["lost_classes"][:_LISTED]]
    if lost:
        found.append(f"Classes that lost most: {', '.join(lost)}.")
    found.append(
        f"It was evaluated on {images(record)} at {native(record)} px only: not at other sizes, not on other kinds of "
        "images, not for robustness, and not as the backbone of detection or segmentation."
    )
    kept = sum(site["op"] == KEEP for site in record["plan"])
    if kept:
        found.append(
            f"{kept} attention modules keep the softmax; their cost still grows with the square of the tokens."
        )
    found.append("What the original was trained on, and what it is biased to, this model inherits.")
    return bullets(found)


def _where_faster(record: Record) -> str:
    found = speed_of_record(record["speed"])
    sizes, wins = [show_size(p.size) for p in found.points], found.wins_from
    if wins is None:
        return f"It is not faster than the original at {' or '.join(sizes)} px, one image at a time on {found.device}."
    below = sizes[: sizes.index(show_size(wins))]
    slower = f"not at {' or '.join(below)} px, and " if below else ""
    return (
        f"On {found.device}, one image at a time, it is faster than the original {slower}from {show_size(wins)} px on; "
        "on other machines that may be elsewhere."
    )
