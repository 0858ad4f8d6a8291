"""Recovering the attention from the source: two tasks, one loop."""
