"""The model card, written from the record of a conversion."""
