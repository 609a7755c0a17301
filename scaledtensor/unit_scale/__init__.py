"""Unit scaling of whole models: record, plan, run."""

from scaledtensor.unit_scale.verb import unit_scale

__all__ = ["unit_scale"]
