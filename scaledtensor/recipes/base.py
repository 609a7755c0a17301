"""What every recipe has, and the table of recipes by name."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, cast

import torch

from scaledtensor.errors import FormatError, RecipeError
from scaledtensor.formats import BF16, FP16, FP32, Format
from scaledtensor.formats import get as get_format

__all__ = ["RECIPES", "Recipe", "get", "register"]

#: Formats whose arithmetic torch does natively; what flows between matrix products is one of them.
COMPUTE_FORMATS = (BF16, FP16, FP32)

GRADIENT_ROUNDINGS = ("nearest_even", "stochastic")

ROLES = ("forward", "gradient", "activation", "master")


@dataclass(frozen=True)
class Recipe:
    """Formats by role. Subclasses add what they need to choose the scale.

    Every role takes a `Format` or the name of one.

    Raises:
        RecipeError: a format is unknown, or cannot play its role.
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
    rebalance: int = 10
    """Every how many optimizer steps parameters get the scale of the values that they have by then
    (`scaledtensor.rebalance`); 0 for never. Training moves weights away from what their scale was
    made for, and in the backward pass that adds up over the layers."""
    gradient_rounding: str = "nearest_even"
    """How gradients are cast to 8 bits: "nearest_even", or "stochastic", from torch's default
    generator. Rounding to nearest takes all gradients of one size to the same side: with E5M2 a
    rare token's, near p for every other token, off by up to 1/8. Stochastic is right on average."""
    saved: Format | None = None
    """What the inputs of norms, activations and products by element are kept in for the backward
    pass, in groups of 1x16 with a scale each (COAT, arXiv 2410.19313); None keeps them as they
    are. The operands of matrix products are kept as they were cast, in any case."""

    def __post_init__(self) -> None:
        for role in ROLES:
            try:
                object.__setattr__(self, role, get_format(getattr(self, role)))
            except FormatError as error:
                raise RecipeError(f"{type(self).__name__}.{role}: {error}") from error
        self._check_saved()
        every = self.rebalance
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise RecipeError(
                f"{type(self).__name__}.rebalance is a number of steps, or 0; got {every!r}"
            )
        if self.gradient_rounding not in GRADIENT_ROUNDINGS:
            raise RecipeError(
                f"{type(self).__name__}.gradient_rounding is one of "
                f"{', '.join(map(repr, GRADIENT_ROUNDINGS))}; got {self.gradient_rounding!r}"
            )
        for role in ("activation", "master"):
            if getattr(self, role) not in COMPUTE_FORMATS:
                raise RecipeError(
                    f"{type(self).__name__}.{role} is one of "
                    f"{', '.join(f.name for f in COMPUTE_FORMATS)}; "
                    f"got {getattr(self, role).name}"
                )
        for role in ("forward", "gradient"):
            fmt = getattr(self, role)
            if not (fmt.storage_dtype.is_floating_point and fmt.signed):
                raise RecipeError(
                    f"{type(self).__name__}.{role}={fmt.name}: torch has no dtype for operands of "
                    "it; choose a signed 8-bit or wider format that has one, such as e4m3fn"
                )

    def _check_saved(self) -> None:
        if self.saved is None:
            return
        try:
            object.__setattr__(self, "saved", get_format(self.saved))
        except FormatError as error:
            raise RecipeError(f"{type(self).__name__}.saved: {error}") from error
        if self.saved.bits > 8 or not self.saved.signed:
            raise RecipeError(
                f"{type(self).__name__}.saved is None or a signed format of 8 bits or fewer; got "
                f"{self.saved.name}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        if RECIPES.get(self.name) is not type(self):
            raise RecipeError(
                f"{type(self).__name__} cannot be saved: loading finds a recipe by its name, and "
                f"{self.name!r} is not registered as this class: scaledtensor.recipes.base.register"
            )
        values = {f.name: _spelled(getattr(self, f.name)) for f in fields(self)}
        return _restore, (self.name, values)

    def __str__(self) -> str:
        roles = ", ".join(f"{f.name}={_spelled(getattr(self, f.name))}" for f in fields(self))
        return f"{type(self).__name__}({roles})"


RECIPES: dict[str, type[Recipe]] = {}


def _spelled(value: Any) -> Any:
    return value.name if isinstance(value, Format) else value


def _restore(name: str, values: dict[str, Any]) -> Recipe:
    """Unpickle a recipe through its constructor, which validates it."""
    if name not in RECIPES:
        raise RecipeError(f"unknown recipe {name!r}; known recipes: {', '.join(sorted(RECIPES))}")
    return RECIPES[name](**values)


torch.serialization.add_safe_globals([_restore])


def register(recipe: type[Recipe]) -> type[Recipe]:
    """Class decorator: makes `recipe` known to `get` under its `name`.

    Raises:
        RecipeError: the name is empty, not lower case, or taken.
    """
    if not recipe.name or recipe.name != recipe.name.lower():
        raise RecipeError(f"a recipe's name is non-empty and lower case; got {recipe.name!r}")
    if recipe.name in RECIPES:
        raise RecipeError(
            f"the name {recipe.name!r} is taken by {RECIPES[recipe.name].__qualname__}"
        )
    RECIPES[recipe.name] = recipe
    return recipe


def get(name: "str | Recipe") -> Recipe:
    """The recipe called `name` with its defaults; a recipe is returned as it is.

    Raises:
        RecipeError: no recipe has that name.
    """
    if isinstance(name, Recipe):
        return name
    # Registered recipes have defaults for every field, which the base class has not.
    make: Callable[[], Recipe] | None = None
    if isinstance(name, str):
        make = cast(Any, RECIPES.get(name.lower()))
    if make is None:
        raise RecipeError(f"unknown recipe {name!r}; known recipes: {', '.join(sorted(RECIPES))}")
    return make()
