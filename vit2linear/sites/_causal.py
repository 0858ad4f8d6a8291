"""What every kind that follows timm's newer signature refuses alike."""

from __future__ import annotations

from vit2linear.errors import SurgeryError


def refuse_causal(is_causal: bool) -> None:
    """Raise ``SurgeryError`` where a forward asks for causal attention."""
    if is_causal:
        raise SurgeryError("causal attention was asked of a converted site.", "Vision Transformers attend both ways.")
