"""`unit_scaling.constraints`: which scales of an operator are one and the same."""

from scaledtensor.functional.scaling import (
    amean,
    apply_constraint,
    gmean,
    hmean,
    to_grad_input_scale,
    to_left_grad_scale,
    to_output_scale,
    to_right_grad_scale,
)

__all__ = [
    "amean",
    "apply_constraint",
    "gmean",
    "hmean",
    "to_grad_input_scale",
    "to_left_grad_scale",
    "to_output_scale",
    "to_right_grad_scale",
]
