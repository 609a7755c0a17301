"""Quantised models in the files of other libraries."""

from scaledtensor.exchange.onnx import export_onnx

__all__ = ["export_onnx"]
