"""`unit_scale(model, replace={f: g})`: functions of a model that are to be others.

torch's functions pass through the mode that unit scaling is. A plain Python function is made to ask
the mode too: a wrapper takes its place where the model's code finds it, in globals, closures and
attributes of modules. Outside of a unit-scaled model the wrapper calls the function, so it may
stay: nothing is swapped while models run, other threads and other models see the function that they
saw, and Dynamo traces it.
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
from scaledtensor.unit_scaling.mode import UnitScaling
from scaledtensor.unit_scaling.plan import NAMES, Plan, Step
from scaledtensor.unit_scaling.verb import UnitScale, unit_parameters

__all__ = ["ReplacingUnitScale", "overridable"]

M = TypeVar("M", bound=nn.Module)
Function = Callable[..., Any]
Replacements = Mapping[Function, Function]


class ReplacingUnitScale(UnitScale):
    """Unit scaling of a model some of whose functions are others."""

    def __init__(self, replace: Replacements) -> None:
        super().__init__(None)
        self.replace = dict(replace)
        self.found = False

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
        self.replace = {overridable(module, f): g for f, g in self.replace.items()}
        self.found = True

    def __getstate__(self) -> dict[str, Any]:
        # Another process has the functions under their names, and not the wrappers.
        return vars(self) | {"found": False}

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> UnitScaling:
        if not self.found:
            self.find(module)
        with _Recording(self.replace):  # for the case that it has to be recorded
            plan = super().mode(module, args, kwargs).plan
        return _Running(plan, self.replace)

    def forward(self, module: nn.Module) -> Function:
        """The model, as if its code called functions of torch that take the place of others."""
        run, torchs = super().forward(module), _torchs(self.replace)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Called(torchs):
                return run(*args, **kwargs)

        return forward


def _torchs(replace: Replacements) -> dict[Function, Function]:
    """Those by functions of torch, which are scaled as if the model called them."""
    return {f: g for f, g in replace.items() if f in NAMES and g in NAMES}


def _own(replace: Replacements) -> dict[Function, Function]:
    """Those by functions that somebody wrote: each is one function, and is not scaled again."""
    return {f: g for f, g in replace.items() if g not in NAMES}


class _Asked(threading.local):
    """The modes that wrappers ask, of each thread; the innermost is last."""

    modes: tuple["_Replacing", ...] = ()


_ASKED = _Asked()


class _Replacing(TorchFunctionMode):
    """Calls other functions in the place of some."""

    inside = False  # of a replacement, which is left alone

    def keep(self, replace: Replacements) -> None:
        self.replace = replace
        self.torchs, self.own = _torchs(replace), _own(replace)

    def __enter__(self) -> Self:
        _ASKED.modes = (*_ASKED.modes, self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        _ASKED.modes = _ASKED.modes[:-1]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def called(self, function: Function, args: Any, kwargs: Any) -> Any:
        """In the place of a Python function that is replaced."""
        if function in self.own:
            return self.replaced(function, args, kwargs)
        return self.replace[function](*args, **kwargs)  # of torch: every mode sees it

    def replaced(self, function: Function, args: Any, kwargs: Any) -> Any:
        self.inside = True
        try:
            return self.own[function](*args, **kwargs)
        finally:
            self.inside = False


class _Called(TorchFunctionMode):
    """Functions of torch, called in the place of others."""

    def __init__(self, torchs: Replacements) -> None:
        super().__init__()
        self.torchs = torchs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.torchs.get(func, func)(*args, **(kwargs or {}))


class _Recording(_Replacing):
    """While a model is recorded and the calls of the recording are made again."""

    def __init__(self, replace: Replacements) -> None:
        super().__init__()
        self.keep(replace)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.own and not self.inside:
            return self.replaced(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def called(self, function: Function, args: Any, kwargs: Any) -> Any:
        """As one function, whatever it consists of: so it is recorded."""
        if function not in self.own:
            return super().called(function, args, kwargs)

        def opaque(*args: Any, **kwargs: Any) -> Any:
            return self.replaced(function, args, kwargs)

        return wrap_torch_function(_tensors)(opaque)(*args, **kwargs)


class _Running(_Replacing, UnitScaling):
    """Unit scaling by a plan that was recorded with the replacements."""

    def __init__(self, plan: Plan, replace: Replacements) -> None:
        super().__init__(plan)
        self.keep(replace)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            return func(*args, **(kwargs or {}))
        func = self.torchs.get(func, func)
        if func not in self.own:
            return super().__torch_function__(func, types, args, kwargs)
        step = self.next_step(func, args, kwargs or {})
        if step is None:
            return self.replaced(func, args, kwargs or {})
        return self.applied(step, func, args, kwargs or {})

    def scaled(self, step: Step, func: Any, args: Any, kwargs: Any) -> Any:
        if step.add is None and func in self.own:  # a residual sum is no function's
            return self.replaced(func, args, kwargs)
        return super().scaled(step, func, args, kwargs)


def _wrapper(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        modes = _ASKED.modes
        if not modes or modes[-1].inside or wrapper not in modes[-1].replace:
            return function(*args, **kwargs)
        return modes[-1].called(wrapper, args, kwargs)

    return wrapper


def overridable(module: nn.Module, function: Function) -> Function:
    """What a mode sees when the code of `module` calls `function`.

    A function of torch's own is itself. A Python function is wrapped, and the wrapper takes its
    place in every namespace that the methods of `module` and of its parts, or functions that they
    call, look it up in.

    Raises:
        UnsupportedError: it is looked up in none of them, or is no Python function.
    """
    if function in NAMES:
        return function
    if not isinstance(function, FunctionType):
        raise UnsupportedError(
            f"unit_scale(replace=) cannot see calls of {function!r}: keys are functions of torch "
            "and Python functions"
        )
    wrapped = getattr(function, "__wrapped__", None)
    is_wrapper = getattr(wrapped, _WRAPPER, None) is function
    plain = wrapped if wrapped is not None and is_wrapper else function
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


#: Attribute of a function that was wrapped: its wrapper, of which there is one.
_WRAPPER = "_scaledtensor_overridable"


def _tensors(*args: Any, **kwargs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _places(module: nn.Module, *either: Function) -> Iterator[tuple[Any, str]]:
    """The namespaces of the model's code in which a name or a cell is one of `either`."""
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
    """What a function's code may look up: (namespace or cell, name, what is there)."""
    space = caller.__globals__
    for name in caller.__code__.co_names:
        if name not in space:
            continue
        yield space, name, space[name]
        if isinstance(space[name], ModuleType):  # module.function(x)
            inner = vars(space[name])
            yield from ((inner, n, inner[n]) for n in caller.__code__.co_names if n in inner)
    for name, cell in zip(caller.__code__.co_freevars, caller.__closure__ or (), strict=True):
        if cell != CellType():  # which is empty
            yield cell, name, cell.cell_contents


def _is_in(x: Any, either: tuple[Any, ...]) -> bool:
    return any(x is e for e in either)


def _is_torchs(function: FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"
