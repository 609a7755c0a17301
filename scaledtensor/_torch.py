"""The one module that touches private torch names, each with the reason it cannot be avoided."""

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

# What stands for a tensor while shapes are worked out: whoever counts has to tell it from a real
# one.
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import FakeTensor as FakeTensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import optimizer
from torch.utils import checkpoint

# What sees every operator of a thread, those that C++ calls included. torch documents it by its own
# tools (`torch.utils.flop_counter`), and has no public name for it.
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "BODIES",
    "DispatchMode",
    "FakeTensor",
    "coerce_plain_tangents",
    "compute_capability",
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
    "reshape_wrapper",
    "scaled_grouped_mm",
    "scaled_mm",
    "swap",
    "uncompiled",
    "without_function_modes",
    "without_torch_function",
    "without_weak_references",
]

# The public `torch.overrides` cannot run a function without re-entering `__torch_function__`;
# every wrapper subclass in torch itself uses this guard, and Dynamo understands it.
disable_torch_function = torch._C.DisableTorchFunctionSubclass

# The same around one call, (func, types, args, kwargs), without the context manager's 2 us: what
# torch's own subclasses have as their `__torch_function__`.
without_torch_function: Any = torch._C._disabled_torch_function_impl


# The spelling of `torch.nn.functional.grouped_mm` before it had one, which models still use.
grouped_mm = torch._grouped_mm


def make_wrapper(
    cls: type[Tensor], like: Tensor, dtype: torch.dtype, shape: Sequence[int] | None = None
) -> Any:
    """A storage-less tensor of class `cls` with the geometry of `like`, or contiguous of `shape`.

    `_make_wrapper_subclass` is the documented-by-example constructor of wrapper subclasses
    (torch/testing/_internal/two_tensor.py); there is no public spelling.
    """
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
    """The same in the layout `torch.sparse_coo`, of the shape of `like`: no places, no values."""
    return Tensor._make_wrapper_subclass(
        cls, like.shape, dtype=dtype, layout=torch.sparse_coo, device=like.device
    )


def reshape_wrapper(op: torch._ops.OpOverload, x: Tensor, *args: Any, **kwargs: Any) -> None:
    """Change the geometry of the wrapper alone by an operator such as `squeeze_` or `resize_`.

    A wrapper's sizes cannot be assigned. torch's own subclasses run the operator on the wrapper
    with dispatch off in this way (`return_and_correct_aliasing`).
    """
    with torch._C._DisableTorchDispatch():
        op(x, *args, **kwargs)


def functional_twin(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The functional ATen overload that an in-place or out= overload writes the result of.

    `aten::add_.Tensor` and `aten::add.out` -> `aten::add.Tensor`. Found by comparing schemas, since
    overload names do not follow one rule. None when `func` mutates nothing or has no twin.
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
    """`target.copy_(source)` of each pair. What torch's own optimizers gather tensors with; the
    public spelling is a loop, which takes twice as long for small tensors."""
    if targets:
        torch._foreach_copy_(targets, sources)


def foreach_increment(targets: list[Tensor]) -> None:
    """`target += 1` of each, in one call as torch's own optimizers count their steps.

    By a tensor: a number would be made one for each target, which takes four times as long.
    """
    if targets:
        torch._foreach_add_(targets, torch.ones(()), alpha=1.0)


def mark_rows_dynamic(tensors: Sequence[Tensor]) -> None:
    """Have `torch.compile` make one graph for any number of rows.

    The public `torch._dynamo.mark_dynamic` is an error for what has one row, of which torch makes a
    graph of its own.
    """
    from torch._dynamo import maybe_mark_dynamic

    for x in tensors:
        maybe_mark_dynamic(x, 0)


def fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    """x y + z of float32 in one rounding, for code that becomes Inductor's C++.

    No public operator is that: `torch.addcmul` rounds twice there, and the option of Inductor that
    contracts both does so in all of a function, in code that has to have eager's bits too.
    """
    from torch._inductor.inductor_prims import fma

    y, z = (c if isinstance(c, Tensor) else x.new_full((), c) for c in (y, z))
    made: Tensor = fma(x, y, z)
    return made


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether torch defines `func` by other operators, so that `func.decompose` runs it.

    The dispatch keys are private; `OpOverload.decompose` alone answers only by running.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.has_kernel_for_dispatch_key(key)


def inlined(function: Any) -> Any:
    """A Python function of torch.nn.functional, without its own call of `__torch_function__`.

    It makes that call once, for itself, and its caller then runs the body with `__torch_function__`
    off: the matrix products inside would not be seen, and their operands not be cast. torch offers
    no way to enter such a body, so this is the same code with the question answered by no.
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
    """Natural logarithm of a number, or of a size that a compiler keeps symbolic.

    `math.log` would ask for the number and so fix the size: a graph for every length of a sequence.
    `_sym_log2` is the only logarithm of such a size that torch has.
    """
    if isinstance(n, (torch.SymInt, torch.SymFloat)):
        return torch._sym_log2(n) * math.log(2)
    return math.log(n)


def memory_of(x: Tensor) -> int:
    """A number that tensors have in common while they share memory: views of each other do.

    The public `data_ptr()` is zero for every tensor whose memory is not here, such as a wrapper's
    or one on the meta device.
    """
    number: int = x.untyped_storage()._cdata
    return number


def is_transforming() -> bool:
    """Whether this runs inside a transform of torch.func (grad, vjp, jvp, vmap), or in a level of
    forward-mode derivatives.

    The transforms' wrappers hide the class of a tensor from Python, so that `__torch_function__`
    sees some operands and not others; only below them does a ScaledTensor come out again. And an
    operator from Python has no forward-mode derivative: torch would drop the tangent in silence.
    torch asks both questions itself, under these names alone.
    """
    levels: int = torch.autograd.forward_ad._current_level
    return levels >= 0 or torch._C._are_functorch_transforms_active()


def coerce_plain_tangents(into: type[Tensor], coerce: Callable[[Tensor, Any], Tensor]) -> None:
    """Have the backward pass of compiled code take a plain gradient where its graph expects one of
    class `into`: `coerce(gradient, context)`, with the context that `into` flattens to.

    An output of compiled code is of class `into`, and so is the gradient that AOTAutograd traced
    for it. What the user computes from that output decides the real one: `y.sum()` is plain and
    sends a plain gradient, `y.backward(torch.ones(...))` gives one, and an output that the loss
    does not read (the logits beside a loss) gets plain zeros. AOTAutograd asks the gradient itself
    to be what the graph expects, by this method of its class; torch has no other place for it.
    Without the method it raises an error, and where it answers None as well: so nothing changes for
    other classes.
    """

    def answer(x: Tensor, context: Any, expected: type | None = None) -> Tensor | None:
        return coerce(x, context) if expected is into else None

    Tensor.__coerce_same_metadata_as_tangent__ = inlined_only(answer)  # type: ignore[attr-defined]


def is_tracing(x: Tensor) -> bool:
    """Whether `x` is symbolic: a FakeTensor or a FunctionalTensor inside torch.compile/export."""
    return type(x) is not Tensor and not isinstance(x, torch.nn.Parameter)


def compute_capability(x: Tensor) -> tuple[int, int] | None:
    """That of the CUDA device of `x`; None of any other device, and of AMD's."""
    if not x.is_cuda or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(x.device)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    """The product of FP8 matrices, `a` by rows and `b` by columns, under scales of which the shapes
    tell what shares one; float32 sums, or `fast` ones, and one rounding to bfloat16.

    The public `torch.nn.functional.scaled_mm` is lowered to this operator by torch.compile with
    the scales of blocks laid out for itself, which differ.
    """
    product: Tensor = torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, fast: bool
) -> Tensor:
    """The same for groups of rows, with a scale for each row and column. The public
    `torch.nn.functional.scaled_grouped_mm` has no shape function, so that nothing compiles it."""
    product: Tensor = torch._scaled_grouped_mm(
        a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return product


F = TypeVar("F", bound=Callable[..., Any])


def inlined_only(function: F) -> F:
    """`function`, marked: `torch.compile` traces it as a part of what calls it, and never compiles
    its frame by itself, nor those of what it calls.

    Dynamo tries to compile every Python frame that runs beside a graph that broke, those that torch
    calls from C++ included. The strategy of a code object has the interpreter leave them alone, at
    no cost to a call; there is no public name for it.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def uncompiled(function: F, reason: str = "") -> F:
    """`function`, marked: `torch.compile` leaves it, and all that it calls, to Python.

    The public `torch.compiler.disable` imports Dynamo, which takes half as long as torch itself, at
    each import of this library. It tells Dynamo the same by these attributes, and wraps the
    function in one that switches Dynamo off; `inlined_only` does that at no cost to a call.
    """
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason or None)
    return inlined_only(function)


def constant_if_compiled(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which imports Dynamo to set this attribute."""
    vars(function).update(_dynamo_marked_constant=True)
    return function


def error_on_graph_break() -> Any:
    """A context in which `torch.compile` fails, rather than go on, where it breaks the graph.

    `fullgraph=True` is that of a whole compilation and the user's; this is of a region, and ours.
    """
    from torch._dynamo import error_on_graph_break as of

    return of(True)


def is_watched() -> bool:
    """Whether a mode, of functions or of operators, sees what this thread runs, or autocast changes
    it. torch has no public way to ask for modes."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
    )


def is_within_backward() -> bool:
    """Whether autograd is walking a graph on this thread: what runs forward then is recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def innermost_checkpoint() -> Any:
    """What identifies the activation checkpoint that the caller runs in; None outside of any.

    A checkpoint says nothing of itself. One kind hooks the saving of tensors; the other, which
    switches gradients off, shows in the stack alone.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == checkpoint.__name__:
        return hooks[0]
    if torch.is_grad_enabled():
        return None
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals is not vars(checkpoint):
        frame = frame.f_back  # type: ignore[assignment]
    return frame


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """No function mode sees what runs here. Torch has a public way to enter modes, and none to
    leave those of others for a while."""
    modes = [
        torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())
    ]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """No dispatch mode and no transform of `torch.func` sees what runs here either: a tensor made
    here is a real one, also while another is being traced. torch has no public way to do that."""
    with without_function_modes(), _disable_current_modes(), temporarily_clear_interpreter_stack():
        yield


def uncompiled_calls() -> contextlib.AbstractContextManager[None]:
    """Within it, what is compiled runs as the Python that it was made of. The public function that
    does it loads Dynamo, without which nothing is compiled."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    forced: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return forced


def is_within_step() -> bool:
    """Whether some thread is in the step of an optimizer, which iterates over the hooks of steps:
    an error if there come to be fewer of them meanwhile. torch says so nowhere but in the stack."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_globals is vars(optimizer):
                return True
            at = at.f_back
    return False


def holder_of(x: Tensor) -> Literal["weak reference", "hook", "tensor"] | None:
    """What keeps `swap` from a leaf; None where nothing does.

    `torch.utils.swap_tensors` asks for the number of references from C++ as well. It takes a second
    one where the node that accumulates a gradient has it: that of a graph which is kept, mostly one
    whose backward pass has run, as `loss` is in a loop. It does not ask whether somebody has hooks
    at that node, which would never be called again.
    """
    if weakref.getweakrefs(x):
        return "weak reference"
    if x._use_count() == 1:  # type: ignore[attr-defined]
        return None
    if not (x.is_leaf and x.requires_grad):
        return "tensor"
    node = get_gradient_edge(x).node  # made, and counted, if it was not there
    if x._use_count() != 2:  # type: ignore[attr-defined]
        return "tensor"
    return "hook" if _has_hooks(node) else None


def _has_hooks(node: Any) -> bool:
    """Whether Python has hooks at a node of a graph. torch tells those who register one."""
    found = False
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *_: None)
        found |= len(handle.hooks_dict_ref()) > 1
        handle.remove()
    return found


@contextlib.contextmanager
def without_weak_references(model: torch.nn.Module) -> Iterator[None]:
    """Recurrent layers keep weak references to their parameters, which `swap` does not take. Their
    own `_apply` puts these aside in the same way."""
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
    """Let `x`, which nothing holds (`holder_of`), be what `new` is. The backward pass of an earlier
    graph with `x` in it, which would accumulate a gradient where nobody looks, raises `stale()`;
    torch would tell of a module's `.half()` there.
    """
    if x._use_count() > 1:  # type: ignore[attr-defined]

        def refuse(*_: Any) -> None:
            raise stale()

        get_gradient_edge(x).node.register_prehook(refuse)
    torch.utils.swap_tensors(x, new)  # type: ignore[no-untyped-call]


def local_part(x: Any) -> Tensor:
    """What this rank holds of a DTensor, the object itself.

    `to_local` makes a new view of a parameter; what is known of a part stays with the part.
    """
    part: Tensor = x._local_tensor
    return part


def process_group_named(name: str) -> Any:
    """The process group that a functional collective was given by name; torch asks so itself."""
    return torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
