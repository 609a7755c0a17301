"""`unit_scaling.parameter`: see `scaledtensor.mup`, which lists the operations that keep tags."""

from scaledtensor.mup import MupType, Parameter, ParameterData, has_parameter_data

__all__ = ["MupType", "Parameter", "ParameterData", "has_parameter_data"]
