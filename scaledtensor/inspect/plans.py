"""What `unit_scale` does to a model, as a listing."""

from torch import nn

from scaledtensor.errors import ModelError
from scaledtensor.interpose import transforms
from scaledtensor.unit_scale.plan import Plan
from scaledtensor.unit_scale.verb import UnitScale

__all__ = ["plans"]


def plans(model: nn.Module) -> tuple[Plan, ...]:
    """The plans of a `unit_scale`d model, in the order in which they were made: one for each way
    in which it was called. Printed, a plan lists the calls that are changed, and how.

    Raises:
        ModelError: the model is not unit-scaled, or was not called and had no inputs.
    """
    made = [
        plan for t in transforms(model) if isinstance(t, UnitScale) for plan in t.plans.values()
    ]
    if not made:
        raise ModelError(
            "this model has no plan of unit scaling: use scaledtensor.unit_scale(model, inputs), "
            "or call the unit-scaled model once"
        )
    return tuple(made)
