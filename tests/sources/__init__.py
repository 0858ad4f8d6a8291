"""Layouts against the libraries that wrote the checkpoints."""
