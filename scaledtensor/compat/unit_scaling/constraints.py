"""`unit_scaling.constraints`: rules that make several scales of an operator equal."""

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
