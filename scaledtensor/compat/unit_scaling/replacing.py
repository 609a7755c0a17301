"""`unit_scale(model, replace={f: g})`: a model's functions f are replaced by g.

A call of a torch function passes through the torch function mode of unit scaling, which can call
another function. A call of a plain Python function passes through no mode. So a wrapper takes the
function's place where the model's code finds it: in globals, closures and attributes of modules.
The wrapper asks the innermost mode of its thread. Without such a mode it calls the function. So
other models and other threads compute the same as before, and the wrapper may stay.

The published library documents `unit_scale(Model(), replace={new_gelu: U.gelu})` for a Python
function `new_gelu`, so programs need this. Every way that leaves the globals as they are breaks a
promise:

- A mode alone sees the torch functions that `new_gelu` calls, but not where `new_gelu` begins and
  ends. If `new_gelu` is written in NumPy, the mode sees nothing.
- A replacement that stands in the globals during a forward only is seen by other threads and other
  models meanwhile. A wrapper that stands there during a forward only does not reach compiled code:
  a compiled model checks its guards on globals before its forward begins.
- Copies of the model's functions with globals of their own are not found by `super()` and by
  methods that are called through their class. They do not pickle, and they miss a later assignment
  to a global.
- Another `__code__` in the function changes an object of the user's program too, and closures limit
  which code fits.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any, Self, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, wrap_torch_function
from torch.utils import _pytree as pytree

from scaledtensor.errors import ModelError, UnsupportedError
from scaledtensor.models.interpose import interpose
from scaledtensor.unit_scaling.calls import NAMES
from scaledtensor.unit_scaling.mode import UnitScaling
from scaledtensor.unit_scaling.plan import Residual, Step
from scaledtensor.unit_scaling.verb import UnitScale, unit_parameters

__all__ = ["ReplacingUnitScale"]

M = TypeVar("M", bound=nn.Module)
Function = Callable[..., Any]
Replacements = Mapping[Function, Function]


class ReplacingUnitScale(UnitScale):
    """Unit scaling of a model, some of whose functions are replaced."""

    def __init__(self, replace: Replacements) -> None:
        super().__init__(None)
        self.replace = dict(replace)
        self.found = False  # whether the keys are wrappers that the model's code finds

    @classmethod
    def apply(cls, module: M, replace: Replacements) -> M:
        """`scaledtensor.unit_scale(module)` with replacements, in place."""
        for function, other in replace.items():
            if not callable(function) or not callable(other):
                raise ModelError(
                    f"replace maps functions to functions; got {function!r}: {other!r}"
                )
        transform = cls(replace)
        transform.find(module)
        interpose(module, transform)
        unit_parameters(module)
        return module

    def find(self, module: nn.Module) -> None:
        self.replace = {_overridable(module, f): g for f, g in self.replace.items()}
        self.found = True

    def __getstate__(self) -> dict[str, Any]:
        # Another process finds the functions by their names, and has no wrappers.
        return vars(self) | {"found": False}

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> UnitScaling:
        if not self.found:
            self.find(module)
        with _Recording(self.replace):  # has an effect if this call must be recorded first
            plan = super().mode(module, args, kwargs).plan
        return _Running(self.replace, plan)

    def forward(self, module: nn.Module) -> Function:
        """Return the model's forward, with torch functions in the place of torch functions."""
        run, by_torch = super().forward(module), _by_torch(self.replace)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Substituting(by_torch):
                return run(*args, **kwargs)

        return forward


def _by_torch(replace: Replacements) -> dict[Function, Function]:
    """Return the torch functions that are replaced by torch functions. The replacements are scaled
    as if the model called them."""
    return {f: g for f, g in replace.items() if f in NAMES and g in NAMES}


# --- modes that call the replacements --------------------------------------------------------


class _Asked(threading.local):
    """The modes of a thread that wrappers ask. The innermost mode is the last one."""

    modes: tuple["_Replacing", ...] = ()


_ASKED = _Asked()


class _Replacing(TorchFunctionMode):
    """Base of the modes that wrappers ask."""

    inside = False  # whether a custom replacement runs, in which nothing is replaced or scaled

    def __init__(self, replace: Replacements, *given: Any) -> None:
        super().__init__(*given)
        self.replace = replace
        self.by_torch = _by_torch(replace)
        # Replacements that are not functions of torch. Each one counts as a single function, and is
        # not scaled again.
        self.custom = {f: g for f, g in replace.items() if g not in NAMES}

    def __enter__(self) -> Self:
        _ASKED.modes = (*_ASKED.modes, self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _ASKED.modes = _ASKED.modes[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def call_for_wrapper(self, wrapper: Function, args: Any, kwargs: Any) -> Any:
        """Return the replacement's result, for the wrapper of a Python function."""
        if wrapper in self.custom:
            return self.call_custom(wrapper, args, kwargs)
        return self.replace[wrapper](*args, **kwargs)  # a function of torch: all modes see it

    def call_custom(self, function: Function, args: Any, kwargs: Any) -> Any:
        self.inside = True
        try:
            return self.custom[function](*args, **kwargs)
        finally:
            self.inside = False


class _Substituting(TorchFunctionMode):
    """Calls torch functions in the place of torch functions."""

    def __init__(self, by_torch: Replacements) -> None:
        super().__init__()
        self.by_torch = by_torch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.by_torch.get(func, func)(*args, **(kwargs or {}))


class _Recording(_Replacing):
    """The mode while a model is recorded and the recorded calls run again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.custom and not self.inside:
            return self.call_custom(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def call_for_wrapper(self, wrapper: Function, args: Any, kwargs: Any) -> Any:
        if wrapper not in self.custom:
            return super().call_for_wrapper(wrapper, args, kwargs)

        # Overridable, so that the recording has one call and not the calls inside of it.
        @wrap_torch_function(_tensors)
        def opaque(*args: Any, **kwargs: Any) -> Any:
            return self.call_custom(wrapper, args, kwargs)

        return opaque(*args, **kwargs)


class _Running(_Replacing, UnitScaling):
    """Unit scaling by a plan that was recorded with the replacements."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        func = self.by_torch.get(func, func)
        if func not in self.custom:
            return super().__torch_function__(func, types, args, kwargs)
        step = self.next_step(func, args, kwargs or {})
        if step is None:
            return self.call_custom(func, args, kwargs or {})
        return self.applied(step, func, args, kwargs or {})

    def scaled(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if (
            not isinstance(step.work, Residual) and func in self.custom
        ):  # residual sums are never replaced
            return self.call_custom(func, args, kwargs)
        return super().scaled(step, func, args, kwargs)


# --- wrappers in the place of Python functions -----------------------------------------------


def _overridable(module: nn.Module, function: Function) -> Function:
    """Return the function that a mode sees when the code of `module` calls `function`.

    A torch function is seen itself. For a Python function it is a wrapper, which takes the
    function's place in every namespace in which the methods of `module` and of its parts, and the
    functions that they call, look the function up.

    Raises:
        UnsupportedError: none of these namespaces has `function`, or it is no Python function.
    """
    if function in NAMES:
        return function
    if not isinstance(function, FunctionType):
        raise UnsupportedError(
            f"unit_scale(replace=) cannot see calls of {function!r}: keys are functions of torch "
            "and Python functions"
        )
    wrapped: Any = getattr(function, "__wrapped__", None)
    plain = wrapped if getattr(wrapped, _WRAPPER, None) is function else function
    if not hasattr(plain, _WRAPPER):
        setattr(plain, _WRAPPER, _wrapper(plain))
    wrapper: Function = getattr(plain, _WRAPPER)
    places = list(_places(module, plain, wrapper))
    if not places:
        raise UnsupportedError(
            f"unit_scale(replace=) found no call of {function.__qualname__} by its name in the "
            "code of this model. A formula in torch's functions needs no replacement: it is scaled "
            "as a whole. To replace it nevertheless, call the other function in the model's code"
        )
    for place, name in places:
        if isinstance(place, CellType):
            place.cell_contents = wrapper
        else:
            place[name] = wrapper
    return wrapper


#: The attribute of a wrapped function that holds its wrapper. A function has one wrapper.
_WRAPPER = "_scaledtensor_overridable"


def _wrapper(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        modes = _ASKED.modes
        if not modes or modes[-1].inside or wrapper not in modes[-1].replace:
            return function(*args, **kwargs)
        return modes[-1].call_for_wrapper(wrapper, args, kwargs)

    return wrapper


def _tensors(*args: Any, **kwargs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _places(module: nn.Module, *either: Function) -> Iterator[tuple[Any, str]]:
    """Yield the namespaces and cells of the model's code that hold one of `either`, with its name
    there."""
    for part in module.modules():
        yield from ((vars(part), name) for name, x in vars(part).items() if _is_in(x, either))
    seen: set[FunctionType] = set()
    todo = [
        method
        for kind in {kind for part in module.modules() for kind in type(part).__mro__}
        for method in vars(kind).values()
        if isinstance(method, FunctionType)
    ]
    while todo:
        caller = inspect.unwrap(todo.pop())
        if not isinstance(caller, FunctionType) or caller in seen or _is_torchs(caller):
            continue
        seen.add(caller)
        for place, name, held in _names(caller):
            if _is_in(held, either):
                yield place, name
            elif isinstance(held, FunctionType):
                todo.append(held)


def _names(caller: FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the objects that a function's code may look up: (namespace or cell, name, object)."""
    space = caller.__globals__
    for name in caller.__code__.co_names:
        if name not in space:
            continue
        yield space, name, space[name]
        if isinstance(space[name], ModuleType):  # the code may call module.function(x)
            inner = vars(space[name])
            yield from ((inner, n, inner[n]) for n in caller.__code__.co_names if n in inner)
    for name, cell in zip(caller.__code__.co_freevars, caller.__closure__ or (), strict=True):
        if cell != CellType():  # CellType() is an empty cell
            yield cell, name, cell.cell_contents


def _is_in(x: Any, either: tuple[Any, ...]) -> bool:
    return any(x is e for e in either)


def _is_torchs(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"
