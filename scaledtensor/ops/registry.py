"""The registry: it finds the rule of an operator and runs it.

A rule is a small function registered for functional ATen overloads. It gets the arguments of the
overload and returns a `Raw` (elements, their scale, the expected RMS) or plain tensors. The
registry runs an operator by the first of these that applies:

1. the rule of the overload itself;
2. for an in-place or out= overload, the rule of its functional twin, written into the target
   (`ops/writes.py`), or calculated on its elements;
3. for a foreach overload, its per-tensor operator for each element;
4. for a composite operator that arrives whole (as in inference mode), its decomposition;
5. without a rule, the `on_missing` policy, which warns or raises an error.
"""

import hashlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scaledtensor import _torch
from scaledtensor._version import source_digest
from scaledtensor.errors import (
    MissingRuleError,
    MissingRuleWarning,
    RegistryError,
    UnsupportedError,
)
from scaledtensor.formats import FP32, from_dtype
from scaledtensor.ops.operators import Absent, Overload, find
from scaledtensor.ops.results import Raw, dequantized, narrowest, wrap
from scaledtensor.ops.writes import IN_PLACE, foreach, write, written
from scaledtensor.recipes import Recipe
from scaledtensor.scales.forms import Form
from scaledtensor.setting import Setting
from scaledtensor.tensors import verbs
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.tensor import ScaledTensor, from_plain

__all__ = [
    "RULES",
    "Observer",
    "Overload",
    "Raw",
    "Rule",
    "WithoutScale",
    "absent",
    "dispatch",
    "entered",
    "fingerprint",
    "is_missing",
    "missing",
    "observed",
    "observers",
    "on_missing",
    "promoted",
    "rule",
    "rule_of",
    "with_scaled",
]


# --- observers -------------------------------------------------------------------------------

#: Called with (overload, arguments, result) after each operator.
Observer = Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], None]

observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within this context, `observer` is called after every operator on a ScaledTensor.

    A composite or a foreach form comes after the operators that it consists of.
    """
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


# --- plain tensors as arguments of rules -----------------------------------------------------


def with_scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, and scale a plain tensor if the parameter is declared as a ScaledTensor.

    At least one argument of an operator is scaled, but any other may be plain. For example, the
    derivative of a plain activation has a scaled gradient if scaled tensors come after it.
    """
    parameters = list(inspect.signature(function).parameters.values())
    places = [i for i, p in enumerate(parameters) if p.annotation is ScaledTensor]
    tensors = [p for p in parameters if p.annotation is Any or "Tensor" in str(p.annotation)]
    if not places or len(tensors) < 2:  # the only tensor is scaled
        return function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for i in places:
            if i < len(args) and not isinstance(args[i], ScaledTensor) and _is_plain(args[i]):
                args = (*args[:i], _entered(args[i], (args, kwargs)), *args[i + 1 :])
        return function(*args, **kwargs)

    return call


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def _entered(x: Tensor, arguments: Any) -> ScaledTensor:
    scaled = (other for other in tree_leaves(arguments) if isinstance(other, ScaledTensor))
    return entered(x, next(scaled).recipe)


def entered(x: Tensor, recipe: Recipe | None) -> ScaledTensor:
    """Return a plain tensor of floats as a ScaledTensor. Its RMS is measured, once."""
    fmt = FP32 if x.dtype == torch.float64 else from_dtype(x.dtype)
    return from_plain(x, fmt, x.dtype, None if recipe is None else recipe.uncorrected)


def promoted(operands: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of a product, all scaled if one is."""
    scaled = [x for x in operands if isinstance(x, Ruled)]
    if len(scaled) in (0, len(operands)):  # perhaps only the bias is scaled
        return operands
    # `like` gives its scale and recipe alone, so no gradient flows to it.
    like = scaled[0].detach()
    return [x if isinstance(x, Ruled) else verbs.promote(x, like) for x in operands]


# --- the table of rules ----------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """One row of the rule table."""

    op: Overload
    function: Callable[..., Any]
    """The function that was registered."""
    call: Callable[..., Any]
    """The function with the overload bound, if it takes the overload, and with plain tensors
    scaled."""
    finished: bool = False
    """Whether the function returns tensors, and no `Raw` that has to be made one."""

    @property
    def family(self) -> str:
        return self.function.__module__.rpartition(".")[2]

    @property
    def words(self) -> str:
        return (self.function.__doc__ or "").strip()


#: The rule table: functional ATen overload -> rule.
RULES: dict[Overload, Rule] = {}


#: Rules of operators that torch does not define, or not yet: name -> (function, pass_op).
_waiting: dict[str, tuple[Callable[..., Any], bool, bool]] = {}


_handlers: dict[Overload, Callable[..., Any]] = {}


def rule(
    *ops: Overload | Absent, pass_op: bool = False, finished: bool = False
) -> Callable[[F], F]:
    """Register a rule for functional overloads, and so for their in-place, out= and foreach forms.

    With `pass_op` the rule gets the overload as its first argument, for families whose members
    share one rule. With `finished` the rule returns tensors and no `Raw`, so nobody looks for one
    in its result. If torch lacks an operator, the rule waits until torch defines it (`absent`).

    Raises:
        RegistryError: One of `ops` is not an ATen overload, or has a rule already.
    """

    def register(function: F) -> F:
        for op in ops:
            if not isinstance(op, Overload | Absent):
                raise RegistryError(
                    "a rule is for an operator overload such as torch.ops.aten.add.Tensor; "
                    f"got {op!r}"
                )
            other = _function_of(op)
            if other is not None:
                raise RegistryError(
                    f"{op} has a rule already: {other.__module__}.{other.__qualname__}"
                )
        call = with_scaled(function)
        for op in ops:
            if isinstance(op, Absent):
                _waiting[op.name] = function, pass_op, finished
            else:
                RULES[op] = Rule(op, function, partial(call, op) if pass_op else call, finished)
        _handlers.clear()
        fingerprint.cache_clear()
        return function

    return register


def _function_of(op: Overload | Absent) -> Callable[..., Any] | None:
    if isinstance(op, Absent):
        return _waiting[op.name][0] if op.name in _waiting else None
    return RULES[op].function if op in RULES else None


def absent() -> list[str]:
    """Return the names of operators that have a rule and that torch does not define, sorted.

    Other versions of torch define them, or modules of torch that are not loaded.
    """
    for name in list(_waiting):
        found = find(name)
        if isinstance(found, Overload):
            function, pass_op, finished = _waiting.pop(name)
            rule(found, pass_op=pass_op, finished=finished)(function)
    return sorted(_waiting)


def dispatch(op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an ATen overload on arguments with at least one ScaledTensor."""
    handler = _handlers.get(op)
    if handler is None:
        handler = _handlers[op] = _resolve(op)
    try:
        result = handler(*args, **kwargs)
    except WithoutScale:
        result = _on_values(op, args, kwargs)
    for observer in observers:
        observer(op, args, result)
    return result


def rule_of(op: Overload) -> Rule | None:
    """Return the rule of an overload or of its functional twin; None without a rule."""
    twin = _torch.functional_twin(op)
    return RULES.get(op) or (RULES.get(twin) if twin is not None else None)


def is_missing(op: Overload) -> bool:
    """Whether an overload runs by `on_missing`: neither it nor its parts have a rule."""
    return getattr(_resolve(op), "func", None) is _without_rule


def _resolve(op: Overload) -> Callable[..., Any]:
    absent()  # registers the waiting rules of operators that torch has defined since
    if op in RULES:
        own = RULES[op]
        return own.call if own.finished else partial(_functional, own.call)
    twin = _torch.functional_twin(op)
    if twin is not None and twin in RULES:
        arguments = op._schema.arguments
        outputs = [a.name for a in arguments if a.is_out]
        if outputs:
            return partial(_into_outputs, op, twin, outputs)
        # One place, except for rrelu, whose noise is written too.
        places = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
        return partial(_in_place, op, twin, places)
    if "_foreach_" in op._schema.name:
        return partial(foreach, op)
    if _torch.is_composite(op):
        return op.decompose
    return partial(_without_rule if _reads_tensors(op) else _in_float32, op)


def _reads_tensors(op: Overload) -> bool:
    """Whether an operator reads a tensor. `torch.eye(out=x)` only writes one: there is no moment
    that a rule could follow."""
    return any("Tensor" in str(a.type) and not a.is_out for a in op._schema.arguments)


# --- complex numbers and integers ------------------------------------------------------------


class WithoutScale(Exception):  # noqa: N818 - `dispatch` catches it, and no program sees it
    """A rule has met a complex tensor or number, or a dtype of results that is no float dtype."""


def _on_values(op: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on plain values: complex numbers and integers have no scales, and neither
    has the result."""
    for given, argument in zip(args, op._schema.arguments, strict=False):
        into = argument.alias_info is not None and argument.alias_info.is_write
        if into and isinstance(given, ScaledTensor):
            raise UnsupportedError(
                f"{op} writes a complex result into a ScaledTensor, whose elements are real"
            )
    named = {name: _plain_values(x) for name, x in kwargs.items()}
    return op(*_plain_values(args), **named)


def _plain_values(x: Any) -> Any:
    return type(x)(map(_plain_values, x)) if isinstance(x, (list, tuple)) else dequantized(x)


# --- 1. functional ---------------------------------------------------------------------------


def _functional(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = function(*args, **kwargs)
    if isinstance(result, Raw):
        return wrap(result, _operands(args, kwargs))
    if isinstance(result, (tuple, list)):
        operands = _operands(args, kwargs)
        return type(result)(_wrapped(r, operands) for r in result)
    return result.tensor() if isinstance(result, Form) else result


def _wrapped(result: Any, operands: Sequence[Any]) -> Any:
    if isinstance(result, Raw):
        return wrap(result, operands)
    return result.tensor() if isinstance(result, Form) else result


def _operands(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    if len(args) == 2 and not kwargs and type(args[0]) is type(args[1]) is ScaledTensor:
        return args
    found: list[Any] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(i for i in a if isinstance(i, Tensor))
    return found


# --- 2. in-place and out= --------------------------------------------------------------------


def _is_plain_float(x: Any) -> bool:
    """Whether an operator writes into `x` in the dtype of `x`. A rule would round its elements to
    the activations' format, and a float32 sum of thousands of terms would stop growing."""
    return not isinstance(x, ScaledTensor) and x.dtype.is_floating_point


def _in_place(op: Overload, twin: Overload, places: list[int], *args: Any, **kwargs: Any) -> Any:
    if all(_is_plain_float(args[i]) for i in places):
        return _on_values(op, args, kwargs)
    on_elements = IN_PLACE.get(twin)
    if on_elements is not None and on_elements(*args, **kwargs):
        return args[0]
    result = RULES[twin].call(*args, **kwargs)
    inputs = _operands(args, kwargs)
    for i, value in zip(places, _results(result), strict=True):
        write(args[i], value, inputs)
    return args[0]


def _into_outputs(op: Overload, twin: Overload, names: list[str], *args: Any, **kwargs: Any) -> Any:
    if all(_is_plain_float(kwargs[name]) for name in names):
        return _on_values(op, args, kwargs)
    targets = [kwargs.pop(name) for name in names]
    inputs = _operands(args, kwargs)
    # If only the target is scaled, a rule has nothing to work on.
    scaled = any(isinstance(x, ScaledTensor) for x in inputs)
    result = (RULES[twin].call if scaled else twin)(*args, **kwargs)
    for target, value in zip(targets, _results(result), strict=True):
        if target.numel() == 0 and not isinstance(target, ScaledTensor):
            target.resize_(value.q.shape if isinstance(value, Raw) else value.shape)
        write(target, value, inputs)
    return targets[0] if len(targets) == 1 else tuple(targets)


def _results(result: Any) -> Sequence[Any]:
    many = isinstance(result, (tuple, list)) and not isinstance(result, Raw)
    return result if many else [result]


# --- 5. no rule ------------------------------------------------------------------------------

Policy = Literal["warn", "error"]


#: How often each operator without a rule ran, by name.
missing: Counter[str] = Counter()


class on_missing(Setting):  # noqa: N801 - reads as a verb, like torch.no_grad
    """Choose how operators without a rule run: a setting, and a context manager that restores it.

    "warn": The operator runs on dequantised float32, and the result is rescaled by its measured
    RMS. A `MissingRuleWarning` is given once per operator. "error": The operator raises a
    `MissingRuleError`.
    """

    _now: Policy = "warn"

    def __init__(self, policy: Policy) -> None:
        if policy not in ("warn", "error"):
            raise RegistryError(f"on_missing takes 'warn' or 'error'; got {policy!r}")
        super().__init__(policy)


def _without_rule(op: Overload, *args: Any, **kwargs: Any) -> Any:
    if on_missing._now == "error":
        raise MissingRuleError(
            f"{op} has no scale rule. Register one with scaledtensor.ops.rule (CONTRIBUTING.md), "
            "or allow the float32 fallback with scaledtensor.on_missing('warn')"
        )
    missing[str(op)] += 1
    if missing[str(op)] == 1:
        warnings.warn(
            f"{op} has no scale rule: it runs in float32 and its result is rescaled by its "
            "measured RMS",
            MissingRuleWarning,
            stacklevel=2,
        )
    return _in_float32(op, *args, **kwargs)


def _in_float32(op: Overload, *args: Any, **kwargs: Any) -> Any:
    operands = _operands(args, kwargs)
    scaled = [x for x in operands if isinstance(x, ScaledTensor)]
    fmt = narrowest(scaled)
    recipe = next((x.recipe.uncorrected for x in scaled if x.recipe is not None), None)

    def back(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype.is_floating_point and x.dim() > 0:
            return from_plain(x, fmt, x.dtype, recipe)
        return x

    plain_args, plain_kwargs = torch.utils._pytree.tree_map(dequantized, (args, kwargs))
    result = op(*plain_args, **plain_kwargs)
    if op._schema.is_mutable:
        return _write_mutated(op, args, kwargs, plain_args, plain_kwargs, result)
    return torch.utils._pytree.tree_map(back, result)


def _write_mutated(
    op: Overload,
    args: Any,
    kwargs: Any,
    plain_args: Any,
    plain_kwargs: Any,
    result: Any,
) -> Any:
    """Copy the values that an operator wrote into dequantised copies back into its arguments."""
    first = None
    for i, a in enumerate(op._schema.arguments):
        if a.alias_info is None or not a.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(a.name)
        plain = plain_args[i] if i < len(args) else plain_kwargs.get(a.name)
        if isinstance(given, (list, tuple)):
            written(given)
        for target, value in _pairs(given, plain):
            if isinstance(target, ScaledTensor):
                write(target, value, [target])
            first = target if first is None else first
    return first if result is not None else None


def _pairs(given: Any, plain: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(given, (list, tuple)):
        yield from zip(given, plain, strict=True)
    elif given is not None:
        yield given, plain


# --- caches of compiled code -----------------------------------------------------------------


@cache
def fingerprint() -> str:
    """Return a digest of every rule and of the package's code."""
    digest = hashlib.blake2b(source_digest().encode(), digest_size=16)
    for op in sorted(RULES, key=str):
        function = RULES[op].function
        digest.update(f"{op}".encode())
        if not function.__module__.startswith("scaledtensor."):
            digest.update(_source(function).encode())
    return digest.hexdigest()


def _source(function: Callable[..., Any]) -> str:
    """Return the text, defaults and captured values of a rule that other code registered."""
    try:
        text = inspect.getsource(function)
    except OSError:  # typed at a prompt
        text = function.__code__.co_code.hex() + repr(function.__code__.co_names)
    captured = [cell.cell_contents for cell in function.__closure__ or ()]
    return f"{text}{function.__defaults__!r}{captured!r}"
