"""Unit scaling of whole models: record, plan, run."""

from scaledtensor.unit_scaling.verb import unit_scale

__all__ = ["unit_scale"]
