"""Models whose forward runs under torch function modes: the mechanism of whole-model transforms.

A transform changes what a model computes without touching its code: every torch function that the
forward calls, in whatever spelling, passes through the transform's mode. The model keeps its class,
its parameters, its hooks and its name; only the instance's `forward` is another. So it pickles,
deep-copies, generates and compiles (Dynamo traces modes) as before, and `remove` gives it back.
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
    "original",
    "remove",
    "transforms",
]

M = TypeVar("M", bound=nn.Module)


#: Functions whose own calls a mode must see: themselves, past their dispatch to modes.
ENTERED: dict[Callable[..., Any], Callable[..., Any]] = {
    **_torch.BODIES,
    **recurrent.FUNCTIONS,
}


#: The mark of unit scaling.
UNIT_SCALED = "unit_scaled"


class Transform(Protocol):
    """What a model's forward is run under. Picklable, since it is kept in the model."""

    #: Of several on one model those of a lower order see the model's functions first, and those of
    #: a higher order see what the lower ones make of them. A model has one of an order.
    order: ClassVar[int]

    #: A buffer by which a state dict says that its parameters are those of the transformed
    #: function; None where they serve the model without the transform as well.
    mark: ClassVar[str | None]

    def mode(self, module: nn.Module, args: Any, kwargs: Any) -> TorchFunctionMode:
        """A fresh mode for one call of `module`'s own forward."""


class Mode(TorchFunctionMode):
    """A mode of a transform that changes what a model computes."""

    def __init__(self) -> None:
        super().__init__()
        compiling = torch.compiler.is_compiling()
        self.gradients = torch.is_grad_enabled()
        self.checkpoint = None if compiling else _torch.innermost_checkpoint()

    def refuse_checkpoint(self) -> None:
        """Parts of the model that are checkpointed run again in the backward pass, outside of its
        forward and so of this mode. (A checkpoint around the model is none of its parts.)

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
    """A module's own forward, and the transforms that it runs under."""

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self.module = module
        self.own = own  # an instance's own forward, where it had one before
        self.transforms: tuple[Transform, ...] = ()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that the module had."""
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def run(self, modes: Sequence[TorchFunctionMode], args: Any, kwargs: Any) -> Any:
        """Under `modes`; the last one entered is the first to see a call."""
        if not modes:
            return self.original(*args, **kwargs)
        with modes[0]:
            return self.run(modes[1:], args, kwargs)


# Where Dynamo could not trace the whole, it would go on to compile parts, which do not know how far
# the modes around them have come.
@partial(_torch.uncompiled, reason="a transform of the model is entered")
def _run_uncompiled(
    interposed: Interposed, modes: Sequence[TorchFunctionMode], args: Any, kwargs: Any
) -> Any:
    return interposed.run(modes, args, kwargs)


def _forward(interposed: Interposed, *args: Any, **kwargs: Any) -> Any:
    modes = [t.mode(interposed.module, args, kwargs) for t in interposed.transforms]
    if not torch.compiler.is_compiling():
        return _run_uncompiled(interposed, modes, args, kwargs)
    # Dynamo loses a mode where it breaks the graph inside of one: better no result than another.
    with _torch.error_on_graph_break():
        return interposed.run(modes, args, kwargs)


def _made(interposed: Interposed) -> partial[Any]:
    """The instance's `forward`. A partial: export reads through it, and pickle takes it."""
    forward = partial(_forward, interposed)
    own = interposed.own or type(interposed.module).forward.__get__(interposed.module)
    with contextlib.suppress(ValueError, TypeError):  # of a forward written in C
        signature = inspect.signature(own)
        # Whoever asks which arguments a model takes (generation, trainers) sees its own. Without
        # annotations: not all of them pickle.
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
    """Run `module`'s forward under `transform`, beside those that it has, in place.

    Raises:
        ModelError: `module` is no nn.Module, is compiled, or has a transform of that kind.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"a transform takes an nn.Module; got {type(module).__name__}")
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise ModelError(
            "this model is compiled already: transform it first, and compile the result"
        )
    interposed = _interposed(module)
    if interposed is None:
        interposed = Interposed(module, module.__dict__.get("forward"))
        module.__dict__["forward"] = _made(interposed)
    for t in interposed.transforms:
        if t.order == transform.order:
            raise ModelError(
                f"the model has a {type(t).__name__} already; "
                "scaledtensor.models.interpose.remove(model) takes its transforms away"
            )
    if transform.mark is not None:
        _mark(module, transform.mark)
    # The lowest order is entered last.
    every = (*interposed.transforms, transform)
    interposed.transforms = tuple(sorted(every, key=lambda t: -t.order))
    return module


def transforms(module: nn.Module) -> tuple[Transform, ...]:
    """The transforms of `module`, the outermost first."""
    interposed = _interposed(module)
    return () if interposed is None else interposed.transforms


def original(module: nn.Module) -> Callable[..., Any]:
    """The forward that `module` has without its transforms."""
    interposed = _interposed(module)
    return module.forward if interposed is None else interposed.original


def remove(module: M) -> M:
    """Give `module` its own forward back, in place; its parameters stay as they are."""
    interposed = _interposed(module)
    if interposed is not None:
        del module.__dict__["forward"]
        if interposed.own is not None:
            module.__dict__["forward"] = interposed.own
        for mark in _marks(interposed):
            del module._buffers[mark]
        drop_hooks(module._load_state_dict_pre_hooks, _note_missing)
    return module


def drop_hooks(hooks: dict[int, Any], *functions: Callable[..., Any]) -> None:
    """Take `functions` out of one of a module's dicts of hooks. The handles that torch returned
    when they were registered belong to the original and not to copies of the module."""
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook) in functions:  # torch wraps the hooks before a load
            del hooks[key]


# --- what a state dict says of the function ----------------------------------------------------


def _mark(module: nn.Module, name: str) -> None:
    # A buffer is the one entry of a state dict that every way of saving takes. It goes where the
    # parameters are: DistributedDataParallel broadcasts buffers by the means of their devices.
    device = next((p.device for p in module.parameters()), None)
    module.register_buffer(name, torch.ones((), dtype=torch.uint8, device=device))
    module.register_load_state_dict_pre_hook(_note_missing)  # type: ignore[no-untyped-call]


def _marks(interposed: Interposed | None) -> list[str]:
    found = () if interposed is None else interposed.transforms
    return [t.mark for t in found if t.mark is not None]


def _note_missing(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for mark in _marks(_interposed(module)):
        if prefix + mark not in state:
            note_missing(prefix + mark)
            state[prefix + mark] = module._buffers[mark]


def note_missing(mark: str) -> None:
    """Warn that a state dict without this mark goes into a model that has it."""
    warnings.warn(
        f"this state dict has no {mark!r}: it was saved from a model without that transform, or by "
        "a release that did not mark it. With the parameters of an untransformed model this one "
        "computes another function than that did",
        ModelWarning,
        stacklevel=3,
    )
