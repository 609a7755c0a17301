"""Random programs of PyTorch operators, on ScaledTensors and on float64.

A program is data: its inputs, and steps that each name an operator, earlier results and numbers.
Results are counted from the end, modulo their number, so that a program without one of its steps is
still a program. This is how a failing program is made small.

The allowed error follows from the formats. The program also runs a few times in float64 while the
operands and results of every operator move by up to a rounding of their format, up and down by
chance. The results of those runs differ by as much as roundings may change the answer. An answer
that is a few times further from the exact one is wrong. A jump (a sign, a comparison) shows as a
large difference there too.
"""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import scaledtensor as sct
from scaledtensor.testing.rules import exact

#: A square beyond these values is no float32. Norms and variances take squares of values, as
#: torch's kernels do, so a program stops before.
SMALLEST, LARGEST = 2.0**-60, 2.0**60
EXPONENTS = 50
#: Number of float64 runs of a program, before and after a difference counts.
RUNS, SURE = 6, 100
SLACK = 8.0
FORMATS = ("fp32", "bf16", "e4m3fn", "e5m2")


@dataclass
class Input:
    shape: list[int]
    format: str
    exponent: int
    seed: int


@dataclass
class Step:
    op: str
    operands: list[int]
    numbers: list[int]


@dataclass
class Program:
    inputs: list[Input]
    steps: list[Step]

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "Program":
        held = json.loads(text)
        inputs = [Input(**i) for i in held["inputs"]]
        return Program(inputs, [Step(**s) for s in held["steps"]])


# --- operators -------------------------------------------------------------------------------


def _broadcast(x: Tensor, y: Tensor) -> bool:
    sizes = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return all(m == n or 1 in (m, n) for m, n in sizes)


def _same(x: Tensor, y: Tensor) -> Tensor:
    """Return `y`, or its mean, in a shape that broadcasts with `x`."""
    return y if _broadcast(x, y) else y.mean()


def _dim(x: Tensor, n: int) -> int:
    return n % x.dim() if x.dim() else 0


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix."""
    return x.reshape(1, -1) if x.dim() < 2 else x.flatten(0, -2)


def _unit(x: Tensor) -> Tensor:
    """Return numbers near 1, for functions that have no other range."""
    return F.layer_norm(x, x.shape[-1:]) if x.dim() and x.shape[-1] > 1 else x * 0


def _mask(x: Tensor, n: int) -> Tensor:
    places = torch.arange(x.numel()).reshape(x.shape)
    return (places * (2 * n + 1)) % 3 == 0


def _part(x: Tensor, n: int) -> Tensor:
    if not x.dim():
        return x
    d = _dim(x, n)
    return x.narrow(d, 0, max(1, x.shape[d] // 2))


def _matmul(x: Tensor, y: Tensor, n: int) -> Tensor:
    a, b = _rows(x), _rows(y)
    k = min(a.shape[1], b.shape[1])
    a, b = a[:, :k], b[:, :k]
    return [lambda: a @ b.mT, lambda: F.linear(a, b), lambda: torch.einsum("ik,jk->ij", a, b)][
        n % 3
    ]()


def _gathered(x: Tensor, y: Tensor, n: int) -> Tensor:
    if not x.dim():
        return x.clone()
    d = _dim(x, n)
    return x.index_select(d, torch.arange(0, 3) * (n + 1) % x.shape[d])


def _in_place(change: Callable[[Tensor, Tensor, int], Any]) -> Callable[..., Tensor]:
    """Write into a copy, for every other number through a view. The copy is in a compute format,
    since a write into a part of an 8-bit tensor may saturate and warn."""

    def run(x: Tensor, y: Tensor, n: int) -> Tensor:
        held = x * 1.0
        target = _part(held, n) if n % 2 else held
        change(target, y, n)
        return held

    return run


def _fits(x: Tensor, y: Tensor) -> Tensor:
    """Return `y`, or its mean, in a shape that can be written into `x`."""
    sizes = zip(reversed(x.shape), reversed(y.shape), strict=False)
    fits = y.dim() <= x.dim() and all(n in (m, 1) for m, n in sizes)
    return y if fits else y.mean()


OPERATORS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "add": lambda x, y, n: x + _same(x, y),
    "sub": lambda x, y, n: x - _same(x, y),
    "rsub": lambda x, y, n: (n - 4) - x,
    "mul": lambda x, y, n: x * _same(x, y),
    "mul number": lambda x, y, n: x * (n - 3.5),
    "div": lambda x, y, n: x / (_same(x, y).abs() + _same(x, y).abs().mean()),
    "neg": lambda x, y, n: -x,
    "abs": lambda x, y, n: x.abs(),
    "square": lambda x, y, n: x.square(),
    "root": lambda x, y, n: (x.abs() + 1).sqrt(),
    "relu": lambda x, y, n: F.relu(x),
    "gelu": lambda x, y, n: F.gelu(_unit(x)),
    "silu": lambda x, y, n: F.silu(_unit(x)),
    "tanh": lambda x, y, n: _unit(x).tanh(),
    "sigmoid": lambda x, y, n: _unit(x).sigmoid(),
    "exp": lambda x, y, n: _unit(x).clamp(-3, 3).exp(),
    "clamp": lambda x, y, n: _unit(x).clamp(-1, 0.5),
    "maximum": lambda x, y, n: torch.maximum(x, _same(x, y)),
    "where": lambda x, y, n: torch.where(_mask(x, n), x, _fits(x, y)),
    "masked_fill": lambda x, y, n: x.masked_fill(_mask(x, n), 0.0),
    "lerp": lambda x, y, n: torch.lerp(x, _fits(x, y), 0.25),
    "addcmul": lambda x, y, n: torch.addcmul(x, _fits(x, y), _fits(x, y), value=0.5),
    "softmax": lambda x, y, n: _unit(x).softmax(-1),
    "layer_norm": lambda x, y, n: _unit(x),
    "norm": lambda x, y, n: x / (x.norm() + 1),
    "sum": lambda x, y, n: x.sum(_dim(x, n), keepdim=bool(n % 2)) if x.dim() else x.sum(),
    "mean": lambda x, y, n: x.mean(_dim(x, n), keepdim=bool(n % 2)) if x.dim() else x.mean(),
    "amax": lambda x, y, n: x.amax(_dim(x, n), keepdim=True) if x.dim() else x.amax(),
    "cumsum": lambda x, y, n: x.cumsum(_dim(x, n)),
    "var": lambda x, y, n: x.var(_dim(x, n), correction=0, keepdim=True) if x.dim() else x * 0,
    "matmul": _matmul,
    "reshape": lambda x, y, n: x.reshape(-1),
    "transpose": lambda x, y, n: x.transpose(0, -1) if x.dim() else x.view(1),
    "expand": lambda x, y, n: x.unsqueeze(0).expand(2, *x.shape),
    "flip": lambda x, y, n: x.flip(_dim(x, n)) if x.dim() else x.clone(),
    "narrow": lambda x, y, n: _part(x, n),
    "chunk": lambda x, y, n: x.chunk(2, _dim(x, n))[-1] if x.dim() else x.clone(),
    "cat": lambda x, y, n: torch.cat((x.flatten(), y.flatten())),
    "stack": lambda x, y, n: torch.stack((x, x.clone() * 0.5)),
    "gather": _gathered,
    "pad": lambda x, y, n: F.pad(x, (1, 2)) if x.dim() else x.clone(),
    "contiguous": lambda x, y, n: x.contiguous(),
    "add_": _in_place(lambda t, y, n: t.add_(_fits(t, y))),
    "mul_": _in_place(lambda t, y, n: t.mul_(n - 3.5)),
    "copy_": _in_place(lambda t, y, n: t.copy_(_fits(t, y))),
    "zero_": _in_place(lambda t, y, n: t.zero_()),
    "fill_": _in_place(lambda t, y, n: t.fill_(n - 3.5)),
    "relu_": _in_place(lambda t, y, n: t.relu_()),
    "div_": _in_place(lambda t, y, n: t.div_(n + 1.5)),
    "masked_fill_": _in_place(lambda t, y, n: t.masked_fill_(_mask(t, n), 0.0)),
    "index_add_": _in_place(
        lambda t, y, n: (
            t.index_add_(0, torch.zeros(1, dtype=torch.long), t[:1].clone())
            if t.dim()
            else t.mul_(2)
        )
    ),
}


def drawn(seed: int) -> Program:
    """Return a program of 5 to 20 steps over one to three inputs."""
    rng = random.Random(seed)
    inputs = []
    for _ in range(rng.randint(1, 3)):
        shape = [rng.randint(1, 9) for _ in range(rng.randint(0, 3))]
        inputs.append(
            Input(
                shape,
                rng.choice(FORMATS),
                rng.randint(-EXPONENTS, EXPONENTS),
                rng.randrange(1 << 30),
            )
        )
    names = list(OPERATORS)
    steps = [
        Step(rng.choice(names), [rng.randrange(4), rng.randrange(6)], [rng.randrange(8)])
        for _ in range(rng.randint(5, 20))
    ]
    return Program(inputs, steps)


# --- running ---------------------------------------------------------------------------------


def inputs_of(program: Program) -> list[Tensor]:
    """Return the ScaledTensors that a program begins with."""
    found = []
    for i in program.inputs:
        rng = torch.Generator().manual_seed(i.seed)
        x = torch.randn(i.shape, generator=rng) * 2.0**i.exponent
        found.append(sct.scaled(x, i.format))
    return found


def run(program: Program, inputs: list[Tensor]) -> Tensor:
    """Return the last result."""
    found = list(inputs)
    for step in program.steps:
        x, y = (found[-1 - n % len(found)] for n in step.operands)
        found.append(OPERATORS[step.op](x, y, step.numbers[0]))
    return found[-1]


#: Operators that normalise. For equal elements, torch's kernels multiply the rounding error of x -
#: x by a large number.
_NORMALISE = ("gelu", "silu", "tanh", "sigmoid", "exp", "clamp", "softmax", "layer_norm")


def _nearly_equal(x: Tensor) -> bool:
    """Return whether the elements of some row are nearly equal."""
    if not x.dim():
        return False
    return bool(((x.amax(-1) - x.amin(-1)) < 0.05 * x.abs().amax(-1)).any())


def _undecided(x: Tensor, n: int, unit: float) -> bool:
    """Return whether another element is nearly the largest along the dimension of a step. A few
    roundings then decide which element gets the gradient."""
    if not x.dim():
        return False
    top = x.amax(_dim(x, n), keepdim=True)
    return bool(((x != top) & (top - x <= 32 * unit * top.abs())).any())


def sound(program: Program) -> Program:
    """Return the program up to the step where its exact values leave the range, without steps that
    torch refuses or that consist of rounding."""
    found = [exact(x) for x in inputs_of(program)]
    kept: list[Step] = []
    unit = rounding(program)
    for step in program.steps:
        x, y = (found[-1 - n % len(found)] for n in step.operands)
        if step.op in _NORMALISE and _nearly_equal(x):
            continue
        if step.op == "amax" and _undecided(x, step.numbers[0], unit):
            continue
        try:
            out = OPERATORS[step.op](x, y, step.numbers[0])
        except (RuntimeError, IndexError):
            continue
        size = out.abs()
        some = size[size > 0]
        if not out.isfinite().all() or size.numel() > 4096:
            break
        if some.numel() and not SMALLEST < some.max() < LARGEST:
            break
        found.append(out)
        kept.append(step)
    return _known(Program(program.inputs, kept), found)


def _known(program: Program, results: list[Tensor]) -> Program:
    """Return the program up to the step where rounding may be a tenth of a result, as in (x + 1e9)
    - 1e9. Later results may then be anything, as functions bend over so wide a range."""
    first, steps = len(program.inputs), len(program.steps)
    for i in range(2):
        with Moves(rounding(program), -1 - i):
            found = results[:first]
            for n, step in enumerate(program.steps[:steps]):
                x, y = (found[-1 - k % len(found)] for k in step.operands)
                found.append(OPERATORS[step.op](x, y, step.numbers[0]))
                want = results[first + n]
                if (found[-1] - want).abs().max() > 0.1 * want.abs().max():
                    steps = n
                    break
    return Program(program.inputs, program.steps[:steps])


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the result and its gradients with respect to the inputs in use, for a fixed
    gradient."""
    rng = torch.Generator().manual_seed(7)
    seed = torch.randn(out.shape, generator=rng)
    grad: Tensor = sct.scaled(seed) if isinstance(out, sct.ScaledTensor) else seed.to(out.dtype)
    if not out.requires_grad:
        return [out]
    gradients = torch.autograd.grad(out, inputs, grad, allow_unused=True)
    return [out, *(g for g in gradients if g is not None)]


def rounding(program: Program) -> float:
    """Return half a relative step of the narrowest format of the results, plus a little for rules
    that calculate in float32."""
    return 2.0**-22 if all(i.format == "fp32" for i in program.inputs) else 2.0**-8


def differences(program: Program, compiled: str | None = None) -> list[str]:
    """List the places where ScaledTensors differ from float64 by more than rounding explains."""
    program = sound(program)
    inputs = [x.requires_grad_() for x in inputs_of(program)]
    plain = [exact(x) for x in inputs]
    want = _plain(program, plain, None)
    scale = [float(w.abs().max()) if w.numel() else 0.0 for w in want]
    if any(not w.isfinite().all() for w in want) or any(
        s and not SMALLEST < s < LARGEST for s in scale
    ):
        return []

    def function(*xs: Tensor) -> Tensor:
        return run(program, list(xs))

    run_it: Callable[..., Tensor] = function
    if compiled:
        torch.compiler.reset()
        run_it = torch.compile(function, backend=compiled, fullgraph=True)
    got = with_gradients(run_it(*inputs), inputs)
    if len(got) != len(want):
        return [f"{len(got)} results with gradients, expected {len(want)}"]
    unit = rounding(program)
    found, spread = [], [torch.zeros_like(w) for w in want]
    for i in range(SURE):
        moved = _plain(program, plain, Moves(unit, i))
        spread = [
            torch.maximum(s, (m - w).abs()) for s, m, w in zip(spread, moved, want, strict=True)
        ]
        if i + 1 in (RUNS, SURE):
            found = _beyond(got, want, spread, unit)
            if not found:
                break
    return found


def _beyond(got: list[Tensor], want: list[Tensor], spread: list[Tensor], unit: float) -> list[str]:
    found = []
    for i, (g, w, s) in enumerate(zip(got, want, spread, strict=True)):
        name = f"gradient {i - 1}" if i else "result"
        size = float(w.abs().max()) if w.numel() else 0.0
        if g.shape != w.shape:
            found.append(f"{name}: shape {[*g.shape]}, expected {[*w.shape]}")
            continue
        # Elements are as exact as their largest neighbours, because sums round by those.
        allowed = SLACK * (s + s.mean() + unit * w.abs()) + 4 * unit * size
        allowed = allowed.nan_to_num(nan=torch.inf)
        wrong = ~((exact(g) - w).abs() <= allowed)
        if wrong.any():
            at = wrong.flatten().nonzero()[0]
            lost = "not finite, " if not exact(g).isfinite().all() else ""
            found.append(
                f"{name}: {lost}{int(wrong.sum())} of {w.numel()} elements differ; {at.item()}:"
                f" {exact(g).flatten()[at].item()!r}, expected {w.flatten()[at].item()!r} within"
                f" {allowed.flatten()[at].item()!r}"
            )
    return found


def _plain(program: Program, values: list[Tensor], moves: "Moves | None") -> list[Tensor]:
    leaves = [v.clone().requires_grad_() for v in values]
    with moves or contextlib.nullcontext():
        return [t.detach() for t in with_gradients(run(program, list(leaves)), leaves)]


#: Operators that return one of their operands' elements; a gradient depends on the choice.
_CHOOSE = ("amax", "amin", "max", "min", "eq", "ne", "maximum", "minimum")


class Moves(TorchDispatchMode):
    """Move the operands and results of each operator by up to `unit` of each element, by chance.

    Operands move too, since sums and differences inside an operator round them.
    """

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.rng = unit, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if func.is_view or func.namespace != "aten" or schema.name.split("::")[1] in _CHOOSE:
            return func(*args, **kwargs)
        if schema.is_mutable:
            out = func(args[0], *tree_map(self.moved, args[1:]), **kwargs)
            if isinstance(out, Tensor) and out.dtype is torch.float64:
                out.copy_(self.moved(out))
            return out
        return tree_map(self.moved, func(*tree_map(self.moved, args), **kwargs))

    def moved(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype is not torch.float64:
            return x
        step = torch.rand(x.shape, generator=self.rng, dtype=torch.float64) * 2 - 1
        return x * (1 + self.unit * step)


def smaller(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a failing program with as few steps, and as small and plain inputs, as can be
    found."""
    tries = 0
    while tries < 400:
        for candidate in _candidates(program):
            tries += 1
            if fails(candidate):
                program = candidate
                break
        else:
            return program
    return program


def without(program: Program, n: int) -> Program:
    """Return the program without step `n`, where the step's first operand replaces its result."""
    first = len(program.inputs)
    gone, steps = first + n, []
    # Position of a result in the new program, by its position in the old one.
    place = list(range(first))
    for i, step in enumerate(program.steps):
        have = first + i
        used = [place[have - 1 - k % have] for k in step.operands]
        if i == n:
            place.append(used[0])
            continue
        now = have - (have > gone)
        place.append(now)
        steps.append(Step(step.op, [now - 1 - k for k in used], step.numbers))
    return Program(program.inputs, steps)


def _candidates(program: Program) -> list[Program]:
    found = []
    for n in range(1, len(program.steps)):
        found.append(Program(program.inputs, program.steps[:n]))
    for n in range(len(program.steps)):
        found.append(without(program, n))
    for n in range(len(program.inputs)):
        if len(program.inputs) > 1:
            found.append(Program(program.inputs[:n] + program.inputs[n + 1 :], program.steps))
        i = program.inputs[n]
        for change in ({"exponent": 0}, {"format": "fp32"}, {"shape": [*i.shape[1:]]}):
            new = Input(**{**asdict(i), **change})  # type: ignore[arg-type]
            if new != i:
                others = [*program.inputs[:n], new, *program.inputs[n + 1 :]]
                found.append(Program(others, program.steps))
    return found
