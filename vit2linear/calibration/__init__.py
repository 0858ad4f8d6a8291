"""The closed forms: a better start without any training."""
