"""Operators, for the tables of rules: torch's by name, and this library's with their derivatives.

`aten.mul.Tensor` is an operator of torch. Versions of torch differ in a few of some thousand
operators. For an operator that this version lacks, `torch.ops` raises AttributeError, and `aten`
gives an `Absent`. Its rule waits (`registry.rule`), and `scaledtensor.ops.absent` lists it. The
rule is registered when torch defines the operator, as some modules of torch do when they load.

`define_operator` makes an operator with a derivative of its own. Like a line of torch's
`derivatives.yaml`, the derivative names the arguments and results that it reads, and only these are
saved for the backward pass.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from scaledtensor.errors import RegistryError, UnsupportedError
from scaledtensor.tensors import verbs

__all__ = [
    "Absent",
    "Overload",
    "Tensors",
    "aten",
    "c10d",
    "c10d_functional",
    "define_operator",
    "find",
    "fsdp",
    "prims",
]

Overload = torch._ops.OpOverload


@dataclass(frozen=True)
class Absent:
    """The name of an operator overload that this version of torch does not define, or not yet."""

    name: str
    """The name, in the form that `str` gives an overload: "aten.cholesky.default"."""

    def __str__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"torch {torch.__version__} has no operator {self.name}")


def find(name: str) -> Overload | Absent:
    """Return the overload of this name, or an `Absent` if torch does not define it."""
    try:
        found: Overload = attrgetter(name)(torch.ops)
    except AttributeError:
        return Absent(name)
    return found


# Both are modules, like `torch.ops` and its namespaces, because Dynamo reads through modules.
class _Operator(ModuleType):
    """Holds the overloads of one operator."""

    def __getattr__(self, overload: str) -> Any:
        if overload.startswith("__"):
            raise AttributeError(overload)
        found = find(f"{self.__name__}.{overload}")
        if not isinstance(found, Absent):
            setattr(self, overload, found)
        return found


class _Namespace(ModuleType):
    """Holds the operators of one library."""

    def __getattr__(self, operator: str) -> _Operator:
        if operator.startswith("__") and operator.endswith("__"):
            raise AttributeError(operator)
        found = _Operator(f"{self.__name__}.{operator}")
        setattr(self, operator, found)
        return found


aten: Any = _Namespace("aten")
prims: Any = _Namespace("prims")
c10d: Any = _Namespace("c10d")
c10d_functional: Any = _Namespace("_c10d_functional")
fsdp: Any = _Namespace("fsdp")


# --- operators with derivatives of their own -------------------------------------------------

Tensors = dict[str, Tensor | None]


def _save(ctx: Any, tensors: Tensors, inputs: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*tensors.values())


def _saved(ctx: Any) -> Sequence[Any]:
    found: Sequence[Any] = ctx.saved_tensors
    return found


def define_operator(
    schema: str,
    derivative: Callable[..., Any] | None = None,
    *,
    save: Callable[[Any, Tensors, tuple[Any, ...]], None] = _save,
    saved: Callable[[Any], Sequence[Any]] = _saved,
) -> Any:
    """Define the operator `scaledtensor::<schema>` with a derivative, and return its overload.

    The rule that computes the result is registered apart (`registry.rule`).

    Args:
        schema: The schema, as `torch.library.define` takes it.
        derivative: `derivative(grad, ...)` returns the gradients of the tensor arguments in their
            order: one tensor, or a tuple, which may end early. `grad` is the gradient of the first
            result. The names of the other parameters choose the values that are saved for the
            backward pass: an argument of the schema; `result`, or `result0`, `result1`, ... of
            several; `x_shape`, the shape of the argument `x`, which is then not saved itself. For
            each tensor argument, `grad_input_mask` tells whether autograd needs its gradient. None
            refuses a derivative; backward operators that autograd cannot differentiate have None.
        save: `save(ctx, tensors, inputs)` saves the chosen tensors, a dictionary by name. `inputs`
            are all arguments of the call.
        saved: `saved(ctx)` returns the tensors that `save` saved, in the same order.

    Raises:
        RegistryError: A parameter of `derivative` names neither an argument nor a result.
    """
    places: dict[str, int] = {}
    chosen = [] if derivative is None else list(inspect.signature(derivative).parameters)[1:]
    masked = "grad_input_mask" in chosen
    tensors: list[str] = []
    shapes: list[str] = []
    others: list[str] = []

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        given = (*inputs, *(output if isinstance(output, tuple | list) else (output,)))
        ctx.others = {name: given[places[name]] for name in others}
        for name in shapes:
            ctx.others[f"{name}_shape"] = given[places[name]].shape
        save(ctx, {name: given[places[name]] for name in tensors}, inputs)

    def backward(ctx: Any, *grads: Any) -> Any:
        if derivative is None:
            word = own._schema.name.partition("::")[2].removesuffix("_backward")
            raise UnsupportedError(f"{word} of a ScaledTensor has no second derivative")
        named = dict(zip(tensors, saved(ctx), strict=True)) | ctx.others
        if masked:
            needs = ctx.needs_input_grad  # arguments with their default are not counted
            named["grad_input_mask"] = [i < len(needs) and needs[i] for i in differentiable]
        found = derivative(grads[0], **named)
        gradients: list[Any] = [None] * len(arguments)
        found = found if isinstance(found, tuple) else (found,)
        for i, gradient in zip(differentiable, found, strict=False):
            gradients[i] = gradient
        return tuple(gradients)

    own = verbs.operator(schema, backward, setup)
    arguments, results = own._schema.arguments, own._schema.returns
    places.update((a.name, i) for i, a in enumerate(arguments))
    many = len(results) > 1
    names = [f"result{i}" if many else "result" for i, _ in enumerate(results)]
    places.update((name, len(arguments) + i) for i, name in enumerate(names))
    differentiable = [i for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
    for name in chosen:
        if name in places:
            tensor = places[name] in differentiable or name in names
            (tensors if tensor else others).append(name)
        elif name.removesuffix("_shape") in places:
            shapes.append(name.removesuffix("_shape"))
        elif name != "grad_input_mask":
            raise RegistryError(f"{schema} has no argument and no result {name!r}")
    return own
