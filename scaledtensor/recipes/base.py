"""`Recipe`, the base class of all recipes, and the table of recipes by name."""

import fnmatch
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, cast

import torch

from scaledtensor.errors import FormatError, RecipeError
from scaledtensor.formats import BF16, FORMATS, FP16, FP32, Format
from scaledtensor.formats import get as get_format
from scaledtensor.recipes.casts import GEMMS, Cast, Gemm, Gemms, check_bool, check_pairs, kept_high

__all__ = ["RECIPES", "Recipe", "get", "register"]

#: Formats with native arithmetic in torch. The tensors between matrix products are in one of them.
COMPUTE_FORMATS = (BF16, FP16, FP32)

GRADIENT_ROUNDINGS = ("nearest_even", "stochastic")

ROLES = ("forward", "gradient", "activation", "master")

Overrides = tuple[tuple[str, "Recipe | None"], ...]


@dataclass(frozen=True)
class Recipe:
    """The formats of a model by role, and the layers and products that are not cast. Subclasses
    define the cast of each operand by the method `cast`.

    Every role takes a `Format`, its name or its torch dtype.

    Raises:
        RecipeError: a field or a format is unknown, a format cannot play its role, or fields
            contradict each other.
    """

    name: ClassVar[str] = ""

    forward: Format
    """Format of both operands of a forward matrix product. Autograd saves the operands in it."""
    gradient: Format
    """Format of the incoming gradient of a matrix product, for dgrad and wgrad."""
    activation: Format
    """Format of the tensors between the matrix products. The result of a product whose operands
    have 16 or 32 bits is in the format of its operands."""
    master: Format
    """Format of the stored parameters and of their gradients."""
    rebalance: int = 10
    """Parameters get the scale of their present values every so many optimizer steps
    (`scaledtensor.rebalance`); 0 for never. Training moves weights away from the values that their
    scale was made for, and in the backward pass these errors multiply over the layers."""
    gradient_rounding: str = "nearest_even"
    """How gradients are cast to 8 bits: "nearest_even", or "stochastic", from torch's default
    generator. Rounding to nearest moves all gradients of one size in the same direction. With E5M2,
    the gradient of a rare token's logit, near p for every other token, is off by up to 1/8.
    Stochastic rounding is right on average."""
    saved: Format | None = None
    """Format in which autograd keeps the inputs of norms, activations and products by element, in
    groups of 1x16 with a scale each (COAT, arXiv 2410.19313). None keeps them in the activation
    format. The operands of matrix products are always kept as they were cast."""
    weight: Format | None = None
    """Format of weights; None takes `forward`."""
    keep: tuple[str, ...] = ()
    """Products, out of "forward", "dgrad" and "wgrad", that stay in the activation format."""
    min_size: int = 0
    """A weight with a smaller dimension stays plain: for small matrices the casts cost more than
    the faster product gains. 0 leaves no weight out."""
    overrides: Overrides = ()
    """Pairs (pattern, recipe), or a mapping, for modules by their fully qualified name. * and ? are
    wildcards; the first match decides. The recipe None leaves the parameters of a module plain."""
    fast_accumulation: tuple[str, ...] = ("forward",)
    """Products, out of "forward", "dgrad" and "wgrad", that FP8 units may add up in fewer bits than
    float32, which is faster. The default is the forward product, as in torchao and
    TransformerEngine. If operands are cast once for all products, "dgrad" and "wgrad" are given
    only together. Emulated products always add in float32."""
    emulate: bool = False
    """Allows pairs of formats that the FP8 units of no device multiply."""
    store_frozen: bool = False
    """Keeps a weight that needs no gradient when the model is wrapped as the 8-bit codes that
    products cast it to, not in `master`: the same products, bit for bit, for a quarter of the
    bytes. Weights are the matrices that torch's linear, convolution and attention layers multiply
    by, and in other classes matrices named "weight", "proj", "*_weight" or "*_proj". A part of a
    weight (one expert) has the scale of the whole weight."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        # This runs before the constructor of `dataclass`, which would raise a bare TypeError.
        taken = inspect.signature(cls.__init__).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        if not open_ended and (unknown := sorted(given.keys() - taken.keys())):
            raise RecipeError(
                f"{cls.__name__} has no {', '.join(unknown)}; it has "
                f"{', '.join(sorted(taken.keys() - {'self'}))}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, self._format(role))
        for role in ("weight", "saved"):
            if getattr(self, role) is not None:
                object.__setattr__(self, role, self._format(role))
        what = type(self).__name__
        if self.gradient_rounding not in GRADIENT_ROUNDINGS:
            raise RecipeError(
                f"{what}.gradient_rounding is one of "
                f"{', '.join(map(repr, GRADIENT_ROUNDINGS))}; got {self.gradient_rounding!r}"
            )
        for name in ("rebalance", "min_size"):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                meant = "a number of steps" if name == "rebalance" else "a number of elements"
                raise RecipeError(f"{what}.{name} is {meant}, or 0; got {count!r}")
        check_bool(self, "emulate")
        self._check_formats()
        self._check_products("keep")
        self._check_products("fast_accumulation")
        object.__setattr__(self, "overrides", self._checked_overrides())
        # The casts are made once, since every product reads them and contradictions must show here.
        # torch.compile cannot trace the lock of a cached property.
        object.__setattr__(self, "_gemms", self._make_gemms())
        if not self.emulate:
            check_pairs(self.gemms)
        self._check_stored()

    # --- casts by role and product -----------------------------------------------------------

    def cast(self, role: str, gemm: str) -> Cast | None:
        """The cast of an operand. `role` is "input", "weight" or "gradient"; `gemm` is the product
        that it goes into. None leaves the operand in the activation format."""
        raise NotImplementedError

    @property
    def hadamard(self) -> tuple[str, ...]:
        """Products whose operands a random Hadamard transform mixes first."""
        return ()

    @property
    def gemms(self) -> Gemms:
        """How the operands of the three products are cast."""
        made: Gemms = self._gemms  # type: ignore[attr-defined]
        return made

    def _make_gemms(self) -> Gemms:
        def gemm(name: str, left: str, right: str) -> Gemm:
            fast = name in self.fast_accumulation
            return Gemm(self.cast(left, name), self.cast(right, name), name in self.hadamard, fast)

        made = Gemms(
            gemm("forward", "input", "weight"),
            gemm("dgrad", "gradient", "weight"),
            gemm("wgrad", "input", "gradient"),
        )
        return kept_high(made, self.keep)

    @property
    def uncorrected(self) -> "Recipe":
        """This recipe without the corrections that belong to one weight. Tensors that are computed
        from the weight have this recipe."""
        return self

    def of_role(self, role: str) -> Format:
        """The format of an operand with this role."""
        if role == "gradient":
            return self.gradient
        return self.weight if role == "weight" and self.weight is not None else self.forward

    def rounding_of(self, role: str) -> str:
        """The rounding of an operand with this role."""
        return self.gradient_rounding if role == "gradient" else "nearest_even"

    def for_module(self, fqn: str) -> "Recipe | None":
        """The recipe of the module of that name, without overrides; None leaves the module
        plain."""
        for pattern, other in self.overrides:
            if fnmatch.fnmatchcase(fqn, pattern):
                return other
        return replace(self, overrides=()) if self.overrides else self

    def check_shape(self, shape: tuple[int, ...], name: str) -> None:
        """Raise RecipeError if this recipe cannot cast the weight called `name`."""

    # --- files -------------------------------------------------------------------------------

    def to_json(self) -> str:
        """This recipe as JSON, which `from_json` reads. Raises RecipeError if its class is not
        registered."""
        return json.dumps(self._values())

    @staticmethod
    def from_json(text: str) -> "Recipe":
        """The recipe that `to_json` wrote. Raises RecipeError for anything else."""
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"a recipe is written as JSON; got {text!r}: {error}") from error
        return _from_values(values)

    def _values(self) -> dict[str, Any]:
        if RECIPES.get(self.name) is not type(self):
            raise RecipeError(
                f"{type(self).__name__} cannot be saved: loading finds a recipe by its name, and "
                f"{self.name!r} is not registered as this class: scaledtensor.recipes.base.register"
            )
        return {
            "recipe": self.name,
            **{f.name: _spelled(getattr(self, f.name)) for f in fields(self)},
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.name, self._values())

    def __str__(self) -> str:
        """The class and the fields that differ from their default."""
        told = [
            f"{f.name}={_told(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(told)})"

    # --- checks ------------------------------------------------------------------------------

    def _format(self, role: str) -> Format:
        try:
            found = get_format(getattr(self, role))
        except FormatError as error:
            raise RecipeError(f"{type(self).__name__}.{role}: {error}") from error
        if FORMATS.get(found.name) != found:
            raise RecipeError(
                f"{type(self).__name__}.{role} is one of {', '.join(FORMATS)}; got the custom "
                f"format {found.name}. simulate_format takes custom formats"
            )
        return found

    def _check_formats(self) -> None:
        what = type(self).__name__
        for role in ("activation", "master"):
            if getattr(self, role) not in COMPUTE_FORMATS:
                raise RecipeError(
                    f"{what}.{role} is one of {', '.join(f.name for f in COMPUTE_FORMATS)}; "
                    f"got {getattr(self, role).name}"
                )
        for role in ("forward", "weight"):
            fmt = getattr(self, role)
            if fmt in (BF16, FP16) and self.activation not in (fmt, BF16):
                raise RecipeError(
                    f"{what}.activation={self.activation.name}: the result of a product of "
                    f"{fmt.name} operands is {fmt.name}. Give {role} 8 bits, or {role}='fp32'"
                )
        if self.saved is not None and (self.saved.bits > 8 or not self.saved.has_zero):
            raise RecipeError(
                f"{what}.saved is None or a signed format of 8 bits or fewer; got {self.saved.name}"
            )
        for role in ("forward", "weight", "gradient"):
            fmt = getattr(self, role)
            if fmt is not None and not fmt.has_zero:
                raise RecipeError(
                    f"{what}.{role}={fmt.name}: a format of scales; operands need a sign and a zero"
                )

    def _check_products(self, name: str) -> None:
        """Check a field that lists products."""
        if isinstance(getattr(self, name), list):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        given = getattr(self, name)
        if not isinstance(given, tuple) or not set(given) <= set(GEMMS):
            raise RecipeError(
                f"{type(self).__name__}.{name} is a tuple of {', '.join(map(repr, GEMMS))}; got "
                f"{given!r}"
            )

    def _check_stored(self) -> None:
        check_bool(self, "store_frozen")
        if not self.store_frozen:
            return
        what, once = type(self).__name__, self.gemms.once
        if once is None:
            raise RecipeError(
                f"{what}.store_frozen keeps a weight in the one cast that serves all its products, "
                "and this recipe casts for each product separately: give frozen modules one of one "
                "scale a tensor, as overrides={'*.base': Current(store_frozen=True)}"
            )
        weight = once[1]
        if weight.format.bits > 8 or weight.rounding == "stochastic":
            raise RecipeError(
                f"{what}.store_frozen keeps weights in 8 bits, rounded to nearest; this recipe "
                f"casts them to {weight.format.name}, rounded {weight.rounding}"
            )

    def _checked_overrides(self) -> Overrides:
        given = self.overrides
        pairs = given.items() if isinstance(given, Mapping) else given
        try:
            made = tuple((pattern, None if r is None else get(r)) for pattern, r in pairs)
        except (TypeError, ValueError) as error:
            if isinstance(error, RecipeError):
                raise
            raise RecipeError(
                f"{type(self).__name__}.overrides is a mapping from names of modules to recipes; "
                f"got {given!r}"
            ) from error
        for pattern, other in made:
            if not isinstance(pattern, str):
                raise RecipeError(
                    f"an override is for a name, as 'head' or 'blocks.*'; got {pattern!r}"
                )
            if other is not None and other.overrides:
                raise RecipeError(f"the recipe that overrides {pattern!r} has overrides of its own")
        return made


RECIPES: dict[str, type[Recipe]] = {}


def _told(value: Any) -> Any:
    """A field's value for `str`."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in value) + "}"
    return value if not isinstance(value, str) else repr(value)


def _spelled(value: Any) -> Any:
    """A field's value for JSON."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, Recipe):
        return value._values()
    if isinstance(value, Gemms):
        return json.loads(value.spec)
    if isinstance(value, tuple):
        return [_spelled(v) for v in value]
    return value


def _from_values(values: Any) -> Recipe:
    if not isinstance(values, dict) or "recipe" not in values:
        raise RecipeError(f'a recipe in JSON has a "recipe", its name; got {values!r}')
    given = {k: v for k, v in values.items() if k != "recipe"}
    recipe = _registered(values["recipe"])
    if isinstance(given.get("overrides"), list):
        given["overrides"] = [
            (pattern, None if r is None else _from_values(r)) for pattern, r in given["overrides"]
        ]
    return recipe(**given)


def _registered(name: Any) -> type[Recipe]:
    found = RECIPES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise RecipeError(f"unknown recipe {name!r}; known recipes: {', '.join(sorted(RECIPES))}")
    return found


def _restore(name: str, values: dict[str, Any]) -> Recipe:
    """Unpickle a recipe through its constructor, which validates it."""
    return _from_values({"recipe": name, **values})


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
        RecipeError: no recipe has that name, or `name` is a class in place of an instance.
    """
    if isinstance(name, Recipe):
        return name
    if isinstance(name, type) and issubclass(name, Recipe):
        raise RecipeError(
            f"a recipe is an instance, or a name; got the class {name.__name__}: {name.__name__}()"
        )
    # Registered recipes have defaults for every field; the base class does not.
    make: Callable[[], Recipe] = cast(Any, _registered(name))
    return make()
