"""Quantised models in the files of other libraries: save, load, and the table of formats.

sct.exchange.save(model, "folder", "compressed-tensors")
tensors = sct.exchange.load("folder")
sct.exchange.load_into(model, "folder")
sct.exchange.export_onnx(model, args, "model.onnx")
"""

from scaledtensor.exchange.layouts import Layout, parts_of_weight, weight_of_parts
from scaledtensor.exchange.onnx import export_onnx
from scaledtensor.exchange.table import FORMATS, Family
from scaledtensor.exchange.verbs import load, load_into, save

__all__ = [
    "FORMATS",
    "Family",
    "Layout",
    "export_onnx",
    "load",
    "load_into",
    "parts_of_weight",
    "save",
    "weight_of_parts",
]
