"""What every recipe has, and the table of recipes by name."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from scaledtensor.errors import FormatError, RecipeError
from scaledtensor.formats import BF16, FP16, FP32, Format
from scaledtensor.formats import get as get_format

__all__ = ["RECIPES", "Recipe", "get", "register"]

#: Formats whose arithmetic torch does natively; what flows between matrix products is one of them.
COMPUTE_FORMATS = (BF16, FP16, FP32)


@dataclass(frozen=True)
class Recipe:
    """Formats by role. Subclasses add what they need to choose the scale.

    Every field takes a `Format` or the name of one.
    """

    name: ClassVar[str] = ""

    forward: Format
    """Both operands of a matrix product in the forward pass. Autograd saves them in this format."""
    gradient: Format
    """The incoming gradient of a matrix product; cast once, for dgrad and wgrad."""
    activation: Format
    """What flows between the matrix products."""
    master: Format
    """What the parameters are stored in; their gradients arrive in it too."""

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, get_format(given))
            except FormatError as error:
                raise RecipeError(f"{type(self).__name__}.{field.name}: {error}") from error
        for role in ("activation", "master"):
            if getattr(self, role) not in COMPUTE_FORMATS:
                raise RecipeError(
                    f"{type(self).__name__}.{role} is one of "
                    f"{', '.join(f.name for f in COMPUTE_FORMATS)}; "
                    f"got {getattr(self, role).name}"
                )
        for role in ("forward", "gradient"):
            fmt = getattr(self, role)
            if fmt not in COMPUTE_FORMATS and not fmt.storage_dtype.is_floating_point:
                raise RecipeError(
                    f"{type(self).__name__}.{role}={fmt.name}: torch has no dtype for it, and "
                    "packed operands are not supported yet; choose an 8-bit or wider format"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name).name for f in fields(self)}
        return _restore, (self.name, values)

    def __str__(self) -> str:
        roles = ", ".join(f"{f.name}={getattr(self, f.name).name}" for f in fields(self))
        return f"{type(self).__name__}({roles})"


RECIPES: dict[str, type[Recipe]] = {}


def _restore(name: str, values: dict[str, Any]) -> Recipe:
    """Unpickle a recipe through its constructor, which validates it."""
    if name not in RECIPES:
        raise RecipeError(f"unknown recipe {name!r}; known recipes: {', '.join(sorted(RECIPES))}")
    return RECIPES[name](**values)


torch.serialization.add_safe_globals([_restore])


def register(recipe: type[Recipe]) -> type[Recipe]:
    """Class decorator: makes `recipe` known to `get` under its `name`."""
    RECIPES[recipe.name] = recipe
    return recipe


def get(name: "str | Recipe") -> Recipe:
    """The recipe called `name` with its defaults; a recipe is returned as it is.

    Raises:
        RecipeError: no recipe has that name.
    """
    if isinstance(name, Recipe):
        return name
    make: Callable[[], Recipe] | None = (
        RECIPES.get(name.lower()) if isinstance(name, str) else None  # type: ignore[assignment]
    )
    if make is None:
        raise RecipeError(f"unknown recipe {name!r}; known recipes: {', '.join(sorted(RECIPES))}")
    return make()
