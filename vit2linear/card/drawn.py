"""The pictures of a card, drawn from the record of a conversion."""

from __future__ import annotations

from vit2linear.artifact import SITES, SPEED
from vit2linear.card.markdown import Record
from vit2linear.pictures import site_errors
from vit2linear.plots import plot_speed
from vit2linear.speed import speed_of_record


def draw(record: Record) -> dict[str, bytes]:
    """File name to PNG: the error of every converted site, and speed where there are two sizes at least."""
    drawn = {SITES: site_errors(record["history"])} if record["evaluation"]["site_errors"] else {}
    if record.get("speed") and len(record["speed"]["points"]) > 1:
        drawn[SPEED] = plot_speed(speed_of_record(record["speed"]))
    return drawn
