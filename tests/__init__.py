"""Offline, whatever the machine: set before anything imports huggingface_hub, which reads it once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
