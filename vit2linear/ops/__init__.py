"""Operators: what replaces the softmax. A file here is an operator of the same name; ``base.py`` holds their core."""
