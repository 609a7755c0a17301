"""Unit scaling of whole models: a recording of a run, a plan, and a mode that follows the plan."""

from scaledtensor.unit_scaling.verb import unit_scale

__all__ = ["unit_scale"]
