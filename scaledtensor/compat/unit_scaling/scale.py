"""`unit_scaling.scale`: one factor forward and another backward."""

from scaledtensor.functional.scaling import scale_bwd, scale_fwd

__all__ = ["scale_bwd", "scale_fwd"]
