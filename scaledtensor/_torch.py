"""The private names of torch, and why they are used. `scales/_inductor*.py` have some too."""

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext

# Tensors without data stand for real ones in tracing. Code that counts has to tell them apart.
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.optim import optimizer
from torch.utils import checkpoint

# It sees every operator of a thread, also from C++. torch documents it by `utils.flop_counter`.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "BODIES",
    "TRACING",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "coerce_plain_tangents",
    "constant_if_compiled",
    "disable_torch_function",
    "error_on_graph_break",
    "fma",
    "foreach_copy",
    "foreach_increment",
    "functional_twin",
    "grouped_mm",
    "holder_of",
    "inlined",
    "inlined_only",
    "innermost_checkpoint",
    "is_composite",
    "is_tracing",
    "is_transforming",
    "is_watched",
    "is_within_backward",
    "is_within_step",
    "local_part",
    "log",
    "make_sparse_wrapper",
    "make_wrapper",
    "mark_rows_dynamic",
    "memory_of",
    "outside_modes",
    "process_group_named",
    "recording_modes",
    "reshape_wrapper",
    "scaled_grouped_mm",
    "scaled_mm",
    "swap",
    "uncompiled",
    "uncompiled_calls",
    "without_function_modes",
    "without_torch_function",
    "without_weak_references",
]

# The public `torch.overrides` runs a function only by re-entering `__torch_function__`. Dynamo
# understands this guard.
disable_torch_function = torch._C.DisableTorchFunctionSubclass

# The same for one call, as torch's own subclasses use it, without the 2 us of the context manager.
without_torch_function: Any = torch._C._disabled_torch_function_impl

#: The modes under which torch.compile runs operators. They have no public names.
TRACING = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)

# The older, private name of `torch.nn.functional.grouped_mm`, which models still use.
grouped_mm = torch._grouped_mm


def make_wrapper(
    cls: type[Tensor], like: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> Any:
    """A tensor of class `cls` without storage: with the geometry of `like`, or contiguous and of
    `shape`. torch has no public constructor of wrapper subclasses, and shows this one by example
    (torch/testing/_internal/two_tensor.py)."""
    if shape is not None:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=like.device)
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=dtype,
        device=like.device,
    )


def make_sparse_wrapper(cls: type[Tensor], like: Tensor, dtype: torch.dtype) -> Any:
    """A wrapper in the layout `torch.sparse_coo`, of the shape of `like`, without indices and
    values."""
    return Tensor._make_wrapper_subclass(
        cls, like.shape, dtype=dtype, layout=torch.sparse_coo, device=like.device
    )


def reshape_wrapper(op: torch._ops.OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """Change the geometry of the wrapper alone, by an operator such as `squeeze_` or `resize_`.
    torch's own subclasses run it with dispatch off in this way (`return_and_correct_aliasing`)."""
    with torch._C._DisableTorchDispatch():
        op(x, *args, **kwargs)


def functional_twin(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional ATen overload whose result an in-place or out= overload writes.

    `aten::add_.Tensor` and `aten::add.out` -> `aten::add.Tensor`. The schemas are compared, since
    overload names do not follow one rule. None if `func` mutates nothing or has no twin.
    """
    schema = func._schema
    if not schema.is_mutable:
        return None
    name = schema.name.split("::")[1]
    if any(a.is_out for a in schema.arguments):
        base = name
    elif name.endswith("_") and not name.startswith("__"):
        base = name[:-1]
    else:
        return None
    wanted = _inputs(schema)
    for spelling in (base, f"{base}_functional"):  # `normal_` is the latter
        packet = getattr(torch.ops.aten, spelling, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            if not candidate._schema.is_mutable and _inputs(candidate._schema) == wanted:
                return candidate  # type: ignore[no-any-return]
    return None


def _inputs(schema: Any) -> Sequence[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """`target.copy_(source)` for each pair, as torch's own optimizers do it. The public way is a
    loop, which takes twice as long for small tensors. Only it writes into negated views."""
    if any(map(Tensor.is_neg, targets)):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    elif targets:
        torch._foreach_copy_(targets, sources)


def foreach_increment(targets: list[Tensor]) -> None:
    """`target += 1` for each target, in one call. torch's own optimizers count their steps so.
    The 1 is a tensor, since torch would make one for each target, in four times the time."""
    if targets:
        torch._foreach_add_(targets, torch.ones((), dtype=torch.float32), alpha=1.0)


def mark_rows_dynamic(tensors: Sequence[Tensor]) -> None:
    """Have `torch.compile` make one graph for any number of rows.

    The public `torch._dynamo.mark_dynamic` raises an error for a tensor of one row, since torch
    makes a separate graph for it.
    """
    from torch._dynamo import maybe_mark_dynamic

    for x in tensors:
        maybe_mark_dynamic(x, 0)


def fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    """x y + z of float32 in one rounding, for code that becomes Inductor's C++.

    No public operator does that: `torch.addcmul` rounds twice there. Inductor's option that
    contracts a product and a sum affects all of a function, also code that needs the bits of eager
    code.
    """
    from torch._inductor.inductor_prims import fma

    y, z = (c if isinstance(c, Tensor) else x.new_full((), c) for c in (y, z))
    made: Tensor = fma(x, y, z)
    return made


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether torch defines `func` by other operators, so that `func.decompose` runs it.

    The dispatch keys are private. The public `OpOverload.decompose` answers only by running.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.has_kernel_for_dispatch_key(key)


def inlined(function: Any) -> Any:
    """A Python function of torch.nn.functional, without its own call of `__torch_function__`.

    The function makes that call once, for itself. Its caller then runs the body with
    `__torch_function__` off, so that nothing would see the matrix products inside and cast their
    operands. torch has no way to enter such a body. So this is the same code, in which
    `has_torch_function` answers False.
    """
    world = function.__globals__ | {"has_torch_function": lambda tensors: False}
    body = FunctionType(function.__code__, world, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


# Python functions of torch that are built from matrix products.
BODIES: dict[Any, Any] = {
    function: inlined(function) for function in (torch.nn.functional.multi_head_attention_forward,)
}


def log(n: float) -> float:
    """Natural logarithm of a number, or of a symbolic size.

    `math.log` would ask for the number, which fixes the size: one graph for each length of a
    sequence. `_sym_log2` is torch's only logarithm of a symbolic size.
    """
    if isinstance(n, (torch.SymInt, torch.SymFloat)):
        return torch._sym_log2(n) * math.log(2)
    return math.log(n)


def memory_of(x: Tensor) -> int:
    """A number that identifies the memory of a tensor. Views of each other have the same number.

    The public `data_ptr()` is zero for every tensor without memory of its own, such as a wrapper or
    a tensor on the meta device.
    """
    number: int = x.untyped_storage()._cdata
    return number


def is_transforming() -> bool:
    """Whether this runs inside a transform of torch.func (grad, vjp, jvp, vmap), or in a level of
    forward-mode derivatives.

    The wrappers of transforms hide the class of a tensor from Python, so `__torch_function__` sees
    some operands and not others. ScaledTensors appear again below the wrappers. Operators that are
    defined in Python have no forward-mode derivative: torch would drop the tangent silently. torch
    has only these private names for both questions.
    """
    levels: int = torch.autograd.forward_ad._current_level
    return levels >= 0 or torch._C._are_functorch_transforms_active()


def coerce_plain_tangents(into: type[Tensor], coerce: Callable[[Tensor, Any], Tensor]) -> None:
    """Let the backward pass of compiled code take a plain gradient where its graph expects one of
    class `into`. The gradient becomes `coerce(gradient, context)`, with the context that `into`
    flattens to.

    If an output of compiled code is of class `into`, AOTAutograd traces a gradient of that class.
    The real gradient depends on the user's code: `y.sum()` is plain and sends a plain gradient,
    `y.backward(torch.ones(...))` passes a plain one, and an output that the loss does not read (the
    logits beside a loss) gets plain zeros. AOTAutograd then calls this method of the gradient's
    class to convert it; torch has no other place for the conversion. If the class has no such
    method, or the method returns None, AOTAutograd raises an error. So nothing changes for other
    classes.
    """

    def answer(x: Tensor, context: Any, expected: type | None = None) -> Tensor | None:
        return coerce(x, context) if expected is into else None

    Tensor.__coerce_same_metadata_as_tangent__ = inlined_only(answer)  # type: ignore[attr-defined]


def is_tracing(x: Tensor) -> bool:
    """Whether `x` is symbolic: a FakeTensor or a FunctionalTensor inside torch.compile/export."""
    return type(x) is not Tensor and not isinstance(x, torch.nn.Parameter)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    """The product of FP8 matrices, `a` by rows and `b` by columns. The shapes of the scales say
    which elements share a scale. Sums are float32, or `fast`, and rounded once to bfloat16.

    torch.compile lowers the public `torch.nn.functional.scaled_mm` to this operator, but lays the
    scales of blocks out differently.
    """
    product: Tensor = torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, fast: bool
) -> Tensor:
    """`scaled_mm` for groups of rows, with a scale for each row and column. The public
    `torch.nn.functional.scaled_grouped_mm` has no shape function, so it cannot be compiled."""
    product: Tensor = torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product


F = TypeVar("F", bound=Callable[..., Any])


def inlined_only(function: F) -> F:
    """Mark `function`: `torch.compile` traces it as a part of its caller, and never compiles its
    frame, or the frames of its callees, separately.

    After a graph break Dynamo tries to compile every Python frame that runs, also frames that torch
    calls from C++. The strategy of a code object tells the interpreter to leave the frame alone, at
    no cost to a call. There is no public name for it.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def uncompiled(function: F, reason: str = "") -> F:
    """Mark `function`: `torch.compile` leaves it, and all functions that it calls, to Python.

    The public `torch.compiler.disable` would import Dynamo at each import of this library, which
    takes half as long as torch itself. It sets the same attributes, and wraps the function in
    another that switches Dynamo off. `inlined_only` does that at no cost to a call.
    """
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason or None)
    return inlined_only(function)


def constant_if_compiled(function: F) -> F:
    """`torch.compiler.assume_constant_result`, without the import of Dynamo."""
    vars(function).update(_dynamo_marked_constant=True)
    return function


def error_on_graph_break() -> Any:
    """A context in which a graph break is an error: the public `fullgraph=True`, for a region."""
    from torch._dynamo import error_on_graph_break

    return error_on_graph_break(True)


def is_watched() -> bool:
    """Whether a mode, of functions or of operators, or autocast sees the calls of this thread."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
    )


#: The number of modes that see this thread's operators. They see no loop in C++ that writes memory.
recording_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def is_within_backward() -> bool:
    """Whether this thread runs a backward pass. A forward function is then being recomputed. torch
    has no public name for it."""
    return bool(torch._C._current_graph_task_id() != -1)


def innermost_checkpoint() -> Any:
    """An object that identifies the activation checkpoint that the caller runs in, or None.

    torch has no public way to ask for it. One kind of checkpoint has hooks on saved tensors. The
    other kind, which switches gradients off, is visible only in the stack.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == checkpoint.__name__:
        return hooks[0]
    if torch.is_grad_enabled():
        return None
    return _frame_of(checkpoint, sys._getframe(1))


def _frame_of(module: ModuleType, frame: FrameType | None) -> FrameType | None:
    """The innermost frame of a module in a stack, or None."""
    while frame is not None and frame.f_globals is not vars(module):
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """A context in which no function mode is active. torch has a public way to enter modes, and
    none to leave the modes of other code for a while."""
    count = torch._C._len_torch_function_stack()
    modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """A context without function modes, dispatch modes and transforms of `torch.func`. A tensor
    that is made here is a real one, also during tracing. torch has no public way to do that."""
    with without_function_modes(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def uncompiled_calls() -> contextlib.AbstractContextManager[None]:
    """A context in which compiled code runs as Python. The public function for it loads Dynamo; if
    Dynamo is not loaded, no code is compiled."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    forced: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return forced


@constant_if_compiled
def is_within_step(in_any_thread: bool = False) -> bool:
    """Whether this thread, or any, is in an optimizer's step. torch shows it only in the stack.
    Dynamo keeps the stack of code that it traces."""
    traced = TracingContext.extract_stack() if TracingContext.try_get() else ()
    if any(frame.filename == optimizer.__file__ for frame in traced):
        return True
    stacks = sys._current_frames().values() if in_any_thread else (sys._getframe(),)
    return any(_frame_of(optimizer, stack) is not None for stack in stacks)


def holder_of(x: Tensor) -> Literal["weak reference", "hook", "tensor"] | None:
    """The kind of holder that prevents a `swap` of `x`; None if there is none.

    `torch.utils.swap_tensors` also counts the references from C++. It allows a second reference if
    the node that accumulates the gradient holds it. Such a node belongs to a graph that is kept,
    mostly one whose backward pass has run, like the graph of `loss` in a loop. `swap_tensors` does
    not ask for hooks at that node, which would never be called again.
    """
    if weakref.getweakrefs(x):
        return "weak reference"
    if x._use_count() == 1:  # type: ignore[attr-defined]
        return None
    if not (x.is_leaf and x.requires_grad):
        return "tensor"
    node = get_gradient_edge(x).node  # this makes the node, which then holds `x`, if it is missing
    if x._use_count() != 2:  # type: ignore[attr-defined]
        return "tensor"
    return "hook" if _has_hooks(node) else None


def _has_hooks(node: Any) -> bool:
    """Whether Python has hooks at a node of a graph. Registering a hook shows the others."""
    found = False
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        found |= len(handle.hooks_dict_ref()) > 1
        handle.remove()
    return found


@contextlib.contextmanager
def without_weak_references(model: torch.nn.Module) -> Iterator[None]:
    """A context in which recurrent layers keep no weak references to their parameters, which would
    prevent a `swap`. Their own `_apply` drops the references in the same way."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._flat_weight_refs = [
                None if p is None else weakref.ref(p) for p in layer._flat_weights
            ]


def swap(x: Tensor, new: Tensor, stale: Callable[[], Exception]) -> None:
    """Swap the contents of `x`, which nothing holds (`holder_of`), and `new`.

    The backward pass of an earlier graph with `x` in it would accumulate a gradient that nothing
    reads. It raises `stale()` instead; the error of torch would blame a module's `.half()`.
    """
    if x._use_count() > 1:  # type: ignore[attr-defined]

        def refuse(*_: Any) -> None:
            raise stale()

        get_gradient_edge(x).node.register_prehook(refuse)
    torch.utils.swap_tensors(x, new)


def local_part(x: Any) -> Tensor:
    """The local part of a DTensor: the object itself, which has attributes of its own.

    The public `to_local` makes a new view of a parameter.
    """
    part: Tensor = x._local_tensor
    return part


def process_group_named(name: str) -> Any:
    """The process group of this name. Functional collectives name their group, and torch itself
    finds the group by this function."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
