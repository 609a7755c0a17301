"""`unit_scaling.core`: what unit-scaled functions are made with."""

from scaledtensor.compat.unit_scaling.core import functional

__all__ = ["functional"]
