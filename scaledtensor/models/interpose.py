"""Transforms of whole models: the model's `forward` runs under torch function modes.

A transform changes the computation of a model without touching its code. Every torch function that
`forward` calls, in any spelling, passes through the transform's mode. The model keeps its class,
its parameters, its hooks and its name. Only the instance's `forward` is replaced. So the model
pickles, deep-copies, generates and compiles (Dynamo traces modes) as before, and `remove` restores
it.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from scaledtensor import _torch
from scaledtensor.errors import ModelError, ModelWarning, UnsupportedError
from scaledtensor.ops.rules import recurrent

__all__ = [
    "ENTERED",
    "Mode",
    "Transform",
    "interpose",
    "is_alone",
    "original",
    "remove",
    "transforms",
]

M = TypeVar("M", bound=nn.Module)

#: A function whose inner calls a mode must see -> the same function after its dispatch to modes.
ENTERED: dict[Callable[..., Any], Callable[..., Any]] = {
    **_torch.BODIES,
    **recurrent.FUNCTIONS,
}

#: The mark of unit scaling.
UNIT_SCALED = "unit_scaled"


class Transform(Protocol):
    """A change of a model's computation. It pickles, since the model keeps it."""

    #: Of several transforms, one with a lower order sees the model's functions first, and the next
    #: one sees the functions that it calls. A model has at most one transform of each order.
    order: ClassVar[int]

    #: Name of a buffer that marks a state dict, if its parameters serve only the transformed model;
    #: None if they serve the plain model too.
    mark: ClassVar[str | None]

    #: Whether it gives the parameters another meaning, as `scale_model` does: then the model has no
    #: other transform, and `unscale_model` takes it away.
    alone: ClassVar[bool] = False

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> TorchFunctionMode:
        """Return a new mode for one call of `module`'s original forward."""
        raise NotImplementedError

    def removed(self, module: nn.Module) -> None:
        """Called when `remove` took the transform away from `module`."""
        return


def is_alone(transform: Transform) -> bool:
    """Whether a model has no other transform beside this one. A transform need not derive from
    `Transform`, so it may lack the attributes that have defaults."""
    return getattr(transform, "alone", False)


class Mode(TorchFunctionMode):
    """A mode that changes the computation of a model."""

    def __init__(self) -> None:
        super().__init__()
        compiling = torch.compiler.is_compiling()
        self.gradients = torch.is_grad_enabled()
        self.checkpoint = None if compiling else _torch.innermost_checkpoint()

    def refuse_checkpoint(self) -> None:
        """Refuse a part of the model that is checkpointed: it would run again in the backward pass,
        outside of `forward` and so outside of this mode. A checkpoint around the whole model is
        allowed.

        Raises:
            UnsupportedError: the caller runs in a checkpoint that began within this mode.
        """
        if torch.compiler.is_compiling() or not self.gradients:
            return
        inner = _torch.innermost_checkpoint()
        if inner is not None and inner is not self.checkpoint:
            raise UnsupportedError(
                "a part of a transformed model is checkpointed: it would run again in the backward "
                "pass, where no transform sees it. Checkpoint the whole model, write it with "
                "scaledtensor.nn and scaledtensor.functional, or turn checkpointing off"
            )


class Interposed:
    """A module's original forward, and the transforms under which it runs."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module = module
        self.own = own  # the instance's forward, if it had one before
        self.transforms: tuple[Transform, ...] = ()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward without transforms."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def run(self, modes: Sequence[TorchFunctionMode], args: Any, kwargs: Any) -> Any:
        """Run `original` under `modes`. The last mode that is entered sees a call first."""
        if not modes:
            return self.original(*args, **kwargs)
        with modes[0]:
            return self.run(modes[1:], args, kwargs)


# If Dynamo cannot trace the whole, it compiles parts, which do not know the state of the modes
# around them.
@partial(_torch.uncompiled, reason="a transform of the model is entered")
def _run_uncompiled(
    interposed: Interposed, modes: Sequence[TorchFunctionMode], args: Any, kwargs: Any
) -> Any:
    return interposed.run(modes, args, kwargs)


def _forward(interposed: Interposed, *args: Any, **kwargs: Any) -> Any:
    modes = [t.mode(interposed.module, args, kwargs) for t in interposed.transforms]
    if not torch.compiler.is_compiling():
        return _run_uncompiled(interposed, modes, args, kwargs)
    # Dynamo loses a mode if it breaks the graph inside. An error is better than a wrong result.
    with _torch.error_on_graph_break():
        return interposed.run(modes, args, kwargs)


def _made(interposed: Interposed) -> partial[Any]:
    """The instance's `forward`. It is a partial, which export reads through and pickle takes."""
    forward = partial(_forward, interposed)
    own = interposed.own or type(interposed.module).forward.__get__(interposed.module)
    with contextlib.suppress(ValueError, TypeError):  # for a forward written in C
        signature = inspect.signature(own)
        # Generation and trainers read the signature to find the arguments that a model takes.
        # Annotations are left out, since some do not pickle.
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=bare, return_annotation=signature.empty
        )
    return forward


def _interposed(module: nn.Module) -> Interposed | None:
    forward = module.__dict__.get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        return cast(Interposed, forward.args[0])
    return None


def interpose(module: M, transform: Transform) -> M:
    """Run `module`'s forward under `transform`, in place, in addition to its present transforms.

    Raises:
        ModelError: `module` is no nn.Module, is compiled, or has a transform of the same order or
            one that goes with no other.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"a transform takes an nn.Module; got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise ModelError(
            "this model is compiled already: transform it first, and compile the result"
        )
    for t in transforms(module):
        if t.order == transform.order or is_alone(t) or is_alone(transform):
            raise ModelError(
                f"the model has a {type(t).__name__} already, and no {type(transform).__name__} "
                "goes with it; scaledtensor.models.interpose.remove(model) takes its transforms "
                "away"
            )
    interposed = _interposed(module)
    if interposed is None:
        interposed = Interposed(module, module.__dict__.get("forward"))
        module.__dict__["forward"] = _made(interposed)
    if transform.mark is not None:
        _mark(module, transform.mark)
    # `run` enters the transform of the lowest order last.
    every = (*interposed.transforms, transform)
    interposed.transforms = tuple(sorted(every, key=lambda t: -t.order))
    return module


def transforms(module: nn.Module) -> tuple[Transform, ...]:
    """The transforms of `module`, the outermost first."""
    interposed = _interposed(module)
    return () if interposed is None else interposed.transforms


def original(module: nn.Module) -> Callable[..., Any]:
    """The forward of `module` without its transforms."""
    interposed = _interposed(module)
    return module.forward if interposed is None else interposed.original


def remove(module: M, *given: Transform) -> M:
    """Take transforms away from `module`, in place; by default all of them. Without a transform its
    original forward is restored. Its parameters stay as they are."""
    interposed = _interposed(module)
    if interposed is None:
        return module
    gone = given or interposed.transforms
    for t in gone:
        if t.mark is not None:
            del module._buffers[t.mark]
    interposed.transforms = tuple(t for t in interposed.transforms if t not in gone)
    if not interposed.transforms:
        del module.__dict__["forward"]
        if interposed.own is not None:
            module.__dict__["forward"] = interposed.own
    if not _marks(interposed):
        drop_hooks(module._load_state_dict_pre_hooks, _note_missing)
    for t in gone:
        if hasattr(t, "removed"):
            t.removed(module)
    return module


def drop_hooks(hooks: dict[int, Any], *functions: Callable[..., Any]) -> None:
    """Remove `functions` from one of a module's dicts of hooks.

    The handles that torch returned at registration would not do. They belong to the original module
    and not to its copies.
    """
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook) in functions:  # torch wraps the hooks before a load
            del hooks[key]


# --- marks in state dicts --------------------------------------------------------------------


def _mark(module: nn.Module, name: str) -> None:
    # Every way of saving a state dict takes a buffer. It is on the device of the parameters, since
    # DistributedDataParallel broadcasts buffers in the way of their devices.
    device = next((p.device for p in module.parameters()), None)
    module.register_buffer(name, torch.ones((), dtype=torch.uint8, device=device))
    module.register_load_state_dict_pre_hook(_note_missing)


def _marks(interposed: Interposed | None) -> list[str]:
    found = () if interposed is None else interposed.transforms
    return [t.mark for t in found if t.mark is not None]


def _note_missing(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for mark in _marks(_interposed(module)):
        if prefix + mark not in state:
            note_missing(prefix + mark)
            state[prefix + mark] = module._buffers[mark]


def note_missing(mark: str) -> None:
    """Warn that a state dict without this mark is loaded into a model that has the mark."""
    warnings.warn(
        f"this state dict has no {mark!r}: it was saved from a model without that transform, or by "
        "a release that did not mark it. With the parameters of an untransformed model this one "
        "computes another function than that did",
        ModelWarning,
        stacklevel=3,
    )
