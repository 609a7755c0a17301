"""Checkpoints: safetensors files, and folders that any number of ranks saves and loads."""

from scaledtensor.checkpoint.fit import load_into
from scaledtensor.checkpoint.folder import (
    Loaded,
    about,
    latest,
    load,
    prune,
    save,
    step_folder,
    step_of,
    verify,
)
from scaledtensor.checkpoint.safetensors import load_safetensors, save_safetensors
from scaledtensor.checkpoint.shards import apart

__all__ = [
    "Loaded",
    "about",
    "apart",
    "latest",
    "load",
    "load_into",
    "load_safetensors",
    "prune",
    "save",
    "save_safetensors",
    "step_folder",
    "step_of",
    "verify",
]
