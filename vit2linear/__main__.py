"""``python -m vit2linear``, and through it ``accelerate launch -m vit2linear`` and ``torchrun -m vit2linear``."""

from __future__ import annotations

from vit2linear.cli.main import main

main()
