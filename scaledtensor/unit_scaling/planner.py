"""From a recording to a plan: which functions are replaced, which results scaled, which sums are
residual.

1. A product, norm, attention, embedding or loss becomes its unit-scaled counterpart
   (scaledtensor.functional.spellings), whose closed form follows from the shapes of each call. So
   does an average over positions by which alone what is above it reaches the result; any other is
   a part of a formula, such as a norm's.
2. What lies between those and depends on one tensor alone (an activation in any spelling, a rotary
   embedding, a norm written by hand) is one function of it: where it ends, the result is divided by
   the RMS that the recorded calls give Gaussians. Where it ends in a softmax or in attention's
   logits, its constants are the model's temperature, and stay.
3. A sum of x and of a branch with parameters that starts at x is residual. All such sums in order
   get the weights of the residual rule, and the branch's gradient is delayed to where it starts.
4. Any other function of several tensors is divided by its RMS for independent Gaussians.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree

from scaledtensor.errors import UnsupportedError
from scaledtensor.functional.residual import residual_weights
from scaledtensor.functional.spellings import COUNTERPARTS
from scaledtensor.unit_scaling.gradients import (
    MOVES,
    Cuts,
    delays,
    find_residuals,
    is_shared,
    places_of,
)
from scaledtensor.unit_scaling.plan import Call, Place, Plan, Split, Step, apart, is_average
from scaledtensor.unit_scaling.record import PARAMETER, VARIABLE, Node, Recording, attention_options

__all__ = ["ResidualRule", "plan"]

#: (index of the residual sum, how many there are) -> tau, the branch's weight beside the skip's.
ResidualRule = Callable[[int, int], float]

#: Functions of one tensor or of few that are parts of larger formulas: borders of nothing.
_SUMS = {"add", "radd", "sub", "rsub", "mul"}
_PARTS = {
    *_SUMS,
    *("gelu", "silu", "relu", "leaky_relu", "tanh", "sigmoid"),
}
_POOLS = {f for f, counterpart in COUNTERPARTS.items() if is_average((counterpart.__name__, 0))}
_POINTWISE = {
    f for f, counterpart in COUNTERPARTS.items() if counterpart.__name__ in _PARTS - _SUMS
}
BORDERS = {
    f for f, counterpart in COUNTERPARTS.items() if counterpart.__name__ not in _PARTS
} - _POOLS
_LOGITS = {"softmax", "log_softmax", "scaled_dot_product_attention", "cross_entropy", "logsumexp"}
_CHOICES = {"__getitem__", "select", "narrow", "index_select"}
#: A result within this of unit RMS, in log, needs no constant.
_CLOSE = 0.08
#: A gradient's RMS from here to its reciprocal needs none either.
_LOW = 0.7
#: Magnitudes that are the fills of a mask, and no part of an RMS.
_FILL = 1e30


def plan(
    recording: Recording,
    rule: ResidualRule,
    correlations: Iterable[float] = (),
    gradients: Mapping[int, float] | None = None,
) -> Plan:
    """The plan of a recorded run. `correlations` are those of the tokens that each attention
    without a causal mask reads, and of what each average is of, in order; 0 where they end.
    `gradients` are RMS by the id of a parameter: those of a run by a plan without them."""
    return _Planner(recording, rule, correlations, gradients or {}).plan()


class _Planner:
    def __init__(
        self,
        recording: Recording,
        rule: ResidualRule,
        correlations: Iterable[float],
        gradients: Mapping[int, float],
    ) -> None:
        self.correlations = iter(correlations)
        self.gradients = gradients
        self.recording = recording
        self.rule = rule
        self.nodes = recording.nodes
        self.cuts = Cuts(recording.nodes)
        self.residual = find_residuals(self.nodes, self.cuts, BORDERS)
        self.roots: dict[Node, Node] = {}
        self.pools = {node for node in self.nodes if self.is_pool(node)}
        #: By root, what its region does to it, other than views.
        self.done: dict[Node, list[Node]] = {}

    def plan(self) -> Plan:
        for node in self.nodes:
            root = self.roots[node] = self.root_of(node)
            if root is not node and node.name not in MOVES:
                self.done.setdefault(root, []).append(node)
        steps: dict[Call, Step] = {}
        for node in self.nodes:
            if node.call is None or node.kind != VARIABLE:
                continue
            step = self.step_of(node)
            if step is not None:
                # Of several results, which have one step, the model may use one alone.
                free = step.free or (node.call in steps and steps[node.call].free)
                steps[node.call] = replace(step, free=free)
        for node in self.nodes:
            if node.kind == VARIABLE and node.name == "alias":
                self.add_arguments(steps, node)
        self.add_shared(steps)
        self.add_gradients(steps)
        self.add_delays(steps)
        self.add_residuals(steps)
        self.add_writes(steps)
        names = {name for name, _ in steps}
        calls = tuple(name for name in self.recording.calls if name in names)
        in_order = {n.call: steps[n.call] for n in self.nodes if n.call in steps}
        return Plan(in_order, calls, [f"{s.name} of {tuple(s.shape)}" for s in self.residual])

    # --- what is added to steps --------------------------------------------------------------

    def add_residuals(self, steps: dict[Call, Step]) -> None:
        total = len(self.residual)
        for index, residual in enumerate(self.residual.values()):
            tau = self.rule(index, total)
            node, skip = residual.sum, residual.skip
            _extend(
                steps,
                node,
                add=index,
                skip=node.operands.index(skip),
                tau=tau,
                waiting=residual.waits,
            )
            if residual.waits:
                _extend(steps, skip, split=Split(index, tau))
            of_branch, _ = residual_weights(tau)
            for user, place in residual.entries:
                _extend(steps, user, delays=((place, of_branch),))

    def add_shared(self, steps: dict[Call, Step]) -> None:
        """Parameters of several calls: of the same scale in all, or of none."""
        seen: dict[Node, list[tuple[Node, Place]]] = {}
        for node in self.nodes:
            step = steps.get(node.call) if node.call is not None else None
            if step is None or node.output or not step.counterpart:
                continue
            for operand in dict.fromkeys(node.operands):
                owner = _owner(operand)
                if owner is not None:
                    places = places_of(operand, node)
                    seen.setdefault(owner, []).extend((node, place) for place in places)
                    if not places and len({user.call for user in _uses(owner)}) > 1:
                        _extend(steps, node, exact=True)  # one of a list of several calls
        for which, (owner, uses) in enumerate(seen.items()):
            users = {node for node, _ in uses}
            for node, place in uses:
                if not set(_uses(owner)) <= users:
                    if "constraint" in inspect.signature(COUNTERPARTS[node.func]).parameters:
                        _extend(steps, node, exact=True)
                elif len(users) > 1:
                    _extend(steps, node, shared=((which, place),))

    def add_gradients(self, steps: dict[Call, Step]) -> None:
        """Of parameters above an average: what its gradient is a sum over has one gradient for all
        positions, so that the terms do not average out."""
        below = set(self.pools)
        for node in reversed(self.nodes):
            if any(user in below for user in node.users):
                below.add(node)
        for node in below - self.pools:
            for parameter in dict.fromkeys(node.operands):
                owner = _owner(parameter)
                if owner is None or _uses(owner) != [node] or node.call not in steps:
                    continue
                rms = self.gradients.get(id(owner.tensor), 1.0)
                places = places_of(parameter, node)
                if len(places) == 1 and not _LOW < rms < 1 / _LOW:
                    _extend(steps, node, delays=((places[0], 1 / rms),))

    def add_writes(self, steps: dict[Call, Step]) -> None:
        for node in self.nodes:
            if node.call in steps and (node.in_place or node.is_overwritten):
                written = replace(
                    steps[node.call], in_place=node.in_place, overwritten=node.is_overwritten
                )
                steps[node.call] = written

    def add_delays(self, steps: dict[Call, Step]) -> None:
        for node in self.nodes:
            step = steps.get(node.call) if node.call is not None else None
            if step is None or not step.counterpart or step.free:
                continue
            for changed, fields in delays(node, step, self.cuts, BORDERS):
                _extend(steps, changed, **fields)

    # --- regions -----------------------------------------------------------------------------

    def root_of(self, node: Node) -> Node:
        """The tensor that a node is a function of; itself, where that is not one tensor."""
        if node.kind != VARIABLE or self.is_border(node):
            return node
        roots = {self.roots.get(n, n) for n in node.variables}
        return roots.pop() if len(roots) == 1 else node

    def is_border(self, node: Node) -> bool:
        borders = node.func in BORDERS or node in self.pools
        return not node.operands or borders or node in self.residual

    def is_pool(self, node: Node) -> bool:
        """Whether it is an average by which alone all above it has an effect, on functions with
        parameters or on a result. What a loss or a statistic averages has none."""
        if node.func not in _POOLS or node.call is None or node.output is not None:
            return False
        if len(node.variables) != 1 or node.shape.numel() == 1:
            return False
        return self.cuts.is_cut(node.variables[0], node) and self.has_use(node)

    def has_use(self, node: Node) -> bool:
        seen, todo = {node}, [node]
        while todo:
            found = todo.pop()
            if found.func in BORDERS or (found.returned and found.shape.numel() > 1):
                return True
            new = [user for user in found.users if user not in seen]
            seen.update(new)
            todo += new
        return False

    def is_alone(self, node: Node) -> bool:
        """Whether a function of one tensor is all that its region does, so that it is what its name
        says: not the tanh of somebody's gelu."""
        return self.done.get(self.roots[node]) == [node]

    def step_of(self, node: Node) -> Step | None:
        if node in self.residual:
            return None  # add_residuals
        if node in self.pools:
            return Step(counterpart=True, free=True, correlation=next(self.correlations, 0.0))
        if node.func in BORDERS or (node.func in _POINTWISE and self.is_alone(node)):
            causal = node.func is scaled_dot_product_attention and _is_causal(node)
            tied = node.name == "embedding" and any(map(self.is_tied, node.operands))
            reads_all = node.func is scaled_dot_product_attention and not causal
            return Step(
                counterpart=True,
                free=self.is_free(node),
                causal=causal,
                tied=tied,
                correlation=next(self.correlations, 0.0) if reads_all else None,
            )
        parameters = tuple(i for i, a in enumerate(node.args) if self.is_broadcast(a, node))
        scale = 1.0
        root = self.roots[node]
        if root is node:
            scale = self.scale_of(node, node.variables)
        elif self.ends(node) and not self.is_counterpart_alone(root):
            scale = self.scale_of(node, (root,))
        choice = self.is_choice(node)
        if scale == 1.0 and not parameters and not choice:
            return None
        if scale != 1.0 and node.is_view and node.is_overwritten:
            raise _written_view(node)
        return Step(scale=scale, parameters=parameters, choice=choice)

    def add_arguments(self, steps: dict[Call, Step], node: Node) -> None:
        """The scale of a tensor that was written through a view of it. No call has it as a result,
        so that calls get it as an argument."""
        root = self.roots[node]
        scale = 1.0
        if root is node:
            scale = self.scale_of(node, node.variables)
        elif self.ends(node):
            scale = self.scale_of(node, (root,))
        if scale == 1.0:
            return
        for user in dict.fromkeys(node.users):
            if self.roots.get(user) is not root:
                places = places_of(node, user)
                if user.call is None or len(places) != user.operands.count(node):
                    raise _written_view(node)
                _extend(steps, user, arguments=tuple((place, scale) for place in places))
        if node.returned or node.is_overwritten:
            raise _written_view(node)

    def is_choice(self, node: Node) -> bool:
        """Whether it takes a part of a tensor, and the rest goes nowhere."""
        if node.name not in _CHOICES or len(node.variables) != 1 or node.output is not None:
            return False
        if node.is_view and node.is_overwritten:
            return False  # the write is meant for what it is a view of, too
        (source,) = node.variables
        fewer = node.shape.numel() < source.shape.numel()
        return fewer and node.args[0] is source and self.cuts.is_cut(source, node)

    def is_broadcast(self, x: Any, node: Node) -> bool:
        """Whether `x` is a parameter of no other use, or rows chosen from one for this call alone,
        that is broadcast: its gradient is a sum, and nothing else depends on its scale."""
        if isinstance(x, Node):
            chosen = x.name == "embedding" and len(x.users) == 1
            chosen &= not any(is_shared(n) for n in x.operands if n.kind == PARAMETER)
            return chosen and x.shape.numel() < node.shape.numel()
        if not isinstance(x, Tensor) or x.numel() >= node.shape.numel():
            return False
        found = [n for n in node.operands if n.kind == PARAMETER and n.tensor is x]
        return bool(found) and not any(map(is_shared, found))

    def ends(self, node: Node) -> bool:
        """Whether somebody outside of its region sees the result, other than as logits."""
        if node.returned:
            return True
        for user in node.users:
            if self.roots.get(user) is self.roots[node]:
                continue
            if user.name in _LOGITS:
                continue
            if user.func in BORDERS and len(user.variables) > 1:
                continue  # query times key
            if user.kind == VARIABLE:
                return True
        return False

    def is_counterpart_alone(self, root: Node) -> bool:
        done = self.done.get(root, [])
        return len(done) == 1 and done[0].func in _POINTWISE

    def is_tied(self, parameter: Node) -> bool:
        """Whether a parameter is both looked up and multiplied by."""
        names = {user.name for user in _uses(parameter) if user.func in BORDERS}
        return "embedding" in names and len(names) > 1

    def is_free(self, node: Node) -> bool:
        """Whether the gradients of what a call is made from may each have a scale of their own."""
        if "constraint" not in inspect.signature(COUNTERPARTS[node.func]).parameters:
            return False
        return all(self.cuts.is_cut(operand, node) for operand in node.variables)

    # --- what Gaussians become ---------------------------------------------------------------

    def scale_of(self, node: Node, sources: tuple[Node, ...]) -> float:
        """1 / RMS of the result for independent Gaussian sources; 1 where that is near. A single
        number is a loss or a statistic: it stays what the model says."""
        if node.shape.numel() == 1:
            return 1.0
        rms = _replayed(node, sources)
        if not math.isfinite(rms) or rms == 0:
            if rms != 0:
                warnings.warn(
                    f"unit_scale: {node.name} of {tuple(node.shape)} has no finite RMS for "
                    "Gaussian inputs; it is left unscaled",
                    stacklevel=2,
                )
            return 1.0
        return 1.0 if abs(math.log(rms)) < _CLOSE else 1.0 / rms


def _written_view(node: Node) -> UnsupportedError:
    return UnsupportedError(
        f"unit_scale: the model writes into a view, and one of the tensors that share its memory, "
        f"of shape {tuple(node.shape)}, needs a scale of its own, which the others must not have. "
        "Write out of place, y = y + z instead of y += z, or write into a copy"
    )


def _extend(steps: dict[Call, Step], node: Node, **fields: Any) -> None:
    """Set fields of a call's step; a tuple is added to what is there."""
    assert node.call is not None
    step = steps.get(node.call, Step())
    for name, value in fields.items():
        before = getattr(step, name)
        fields[name] = before + value if isinstance(value, tuple) else value
    steps[node.call] = replace(step, **fields)


def _is_causal(node: Node) -> bool:
    """Whether no query of an attention sees a later key."""
    given = attention_options(node)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        return True
    if not isinstance(mask, Tensor) or mask.shape[-2] < 2:
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask < -_FILL
    later = torch.ones(mask.shape[-2:]).tril(mask.shape[-1] - mask.shape[-2]) == 0
    return bool(later.any() and hidden.cpu()[..., later].all())


def _owner(node: Node) -> Node | None:
    """The parameter that a node is, or is a view of."""
    while node.kind == PARAMETER and len(node.operands) == 1:
        (node,) = node.operands
    return node if node.kind == PARAMETER and not node.operands else None


def _uses(parameter: Node) -> list[Node]:
    """Calls on a parameter or on a view of it."""
    found = []
    for user in parameter.users:
        found += _uses(user) if user.kind == PARAMETER else [user]
    return found


def _replayed(node: Node, sources: tuple[Node, ...]) -> float:
    """RMS of `node` when each source is Gaussian: the recorded calls, made again."""
    rng = torch.Generator().manual_seed(0)
    known = {n: _typical(n, rng) for n in dict.fromkeys(sources)}

    def value(n: Node) -> Tensor:
        if n not in known:
            args, kwargs = pytree.tree_map(
                lambda a: value(a) if isinstance(a, Node) else a, (n.args, n.kwargs)
            )
            if n.in_place:
                known[n], args, kwargs = apart(args, kwargs)
                n.func(*args, **kwargs)
            else:
                result = n.func(*args, **kwargs)
                known[n] = result if n.output is None else result[n.output]
        return known[n]

    with torch.no_grad():
        out = value(node).detach().double()
    out = out[out.isfinite() & (out.abs() < _FILL)]
    return float(out.square().mean().sqrt()) if out.numel() else 0.0


def _typical(source: Node, rng: torch.Generator) -> Tensor:
    """Unit RMS: Gaussian, or the shares of a softmax of Gaussians."""
    assert source.layout is not None
    x = source.layout.gaussian(rng)
    if source.name != "softmax":
        return x
    shares = x.softmax(-1)
    return x.copy_(shares / shares.square().mean().sqrt())
