"""`unit_scaling.core`: tools for writing unit-scaled functions."""

from scaledtensor.compat.unit_scaling.core import functional

__all__ = ["functional"]
