"""The planner makes a plan from a recording: which functions are replaced, which results are
scaled, and which sums are residual.

1. A product, norm, attention, embedding or loss is a border. It becomes its unit-scaled counterpart
   (`scaledtensor.functional.spellings`), and the shapes of each call give the closed form. The same
   holds for an average over positions, if everything above it reaches the result only through it.
   Any other average is part of a formula, such as a norm's.
2. Code between borders that depends on one tensor alone (an activation in any spelling, a rotary
   embedding, a norm written by hand) is one function of this tensor, called a region. Where it
   ends, the result is divided by the RMS that the recorded calls give for Gaussians. If it ends in
   a softmax or in attention's logits, its constants are the model's temperature, and they stay.
3. A sum of x and of a branch with parameters that starts at x is residual. All such sums in order
   get the weights of the residual rule. The branch's gradient is delayed to its start.
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
from scaledtensor.unit_scaling.calls import Call, Family, Place, apart
from scaledtensor.unit_scaling.gradients import (
    Cuts,
    delays,
    find_residuals,
    is_shared,
    owner_of,
    places_of,
    uses_of,
)
from scaledtensor.unit_scaling.plan import Counterpart, Plan, Residual, Scaled, Split, Step, Work
from scaledtensor.unit_scaling.record import PARAMETER, VARIABLE, Node, Recording, attention_options

__all__ = ["ResidualRule", "plan"]

ResidualRule = Callable[[int, int], float]
"""Takes the index of a residual sum and the number of such sums. Returns tau, the branch's weight
relative to the skip connection."""

#: Functions before which a region's constants are the model's temperature.
_LOGITS = {"softmax", "log_softmax", "scaled_dot_product_attention", "cross_entropy", "logsumexp"}
#: Functions that choose elements of a tensor.
_CHOICES = {"__getitem__", "select", "narrow", "index_select"}
#: A result within this distance of unit RMS, in log, needs no constant.
_CLOSE = 0.08
#: A gradient with an RMS between this number and its reciprocal needs no factor.
_LOW = 0.7
#: Larger magnitudes are the fills of a mask, and do not count in an RMS.
_FILL = 1e30


def plan(
    recording: Recording,
    rule: ResidualRule,
    correlations: Iterable[float] = (),
    gradients: Mapping[int, float] | None = None,
) -> Plan:
    """Make the plan of a recorded run.

    Args:
        recording: the run.
        rule: the residual rule.
        correlations: for each attention without a causal mask and each average, in order, the
            correlation of the tokens or elements that it reads. Missing ones are 0.
        gradients: RMS of gradients by the id of a parameter, from a run by a plan without them.
    """
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
        self.residual = find_residuals(self.nodes, self.cuts)
        self.roots: dict[Node, Node] = {}
        self.pools = {node for node in self.nodes if self.is_pool(node)}
        #: For each root, the calls of its region, except views.
        self.done: dict[Node, list[Node]] = {}

    def plan(self) -> Plan:
        for node in self.nodes:
            root = self.roots[node] = self.root_of(node)
            if root is not node and not node.moves:
                self.done.setdefault(root, []).append(node)
        steps: dict[Call, Step] = {}
        for node in self.nodes:
            if node.call is None or node.kind != VARIABLE:
                continue
            step = self.step_of(node)
            if step is not None:
                earlier = steps.get(node.call, Step()).work
                # Several results have one step. The model may use only one of them.
                if isinstance(step.work, Counterpart) and isinstance(earlier, Counterpart):
                    free = step.work.free or earlier.free
                    step = replace(step, work=replace(step.work, free=free))
                steps[node.call] = step
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

    # --- regions -----------------------------------------------------------------------------

    def root_of(self, node: Node) -> Node:
        """Return the only tensor from which a node is made, or the node if there are several."""
        alone = not node.operands or node in self.pools or node in self.residual
        if node.kind != VARIABLE or node.is_border or alone:
            return node
        roots = {self.roots.get(n, n) for n in node.variables}
        return roots.pop() if len(roots) == 1 else node

    def is_pool(self, node: Node) -> bool:
        """Whether a node is an average through which alone everything above it has an effect, on
        functions with parameters or on a result. The average in a loss or a statistic has none."""
        if node.family is not Family.AVERAGE or node.call is None or node.output is not None:
            return False
        if len(node.variables) != 1 or node.shape.numel() == 1:
            return False
        return self.cuts.is_cut(node.variables[0], node) and self.has_use(node)

    def has_use(self, node: Node) -> bool:
        seen, todo = {node}, [node]
        while todo:
            found = todo.pop()
            if found.is_border or (found.returned and found.shape.numel() > 1):
                return True
            new = [user for user in found.users if user not in seen]
            seen.update(new)
            todo += new
        return False

    def is_alone(self, node: Node) -> bool:
        """Whether a function of one tensor is the only call of its region. Otherwise it may be part
        of a formula, such as the tanh in a gelu that a model spells out."""
        return self.done.get(self.roots[node]) == [node]

    def step_of(self, node: Node) -> Step | None:
        if node in self.residual:
            return None  # add_residuals
        if node in self.pools:
            return Step(Counterpart(free=True, correlation=next(self.correlations, 0.0)))
        if node.is_border or (node.family is Family.ACTIVATION and self.is_alone(node)):
            causal = node.func is scaled_dot_product_attention and _is_causal(node)
            tied = node.name == "embedding" and any(map(self.is_tied, node.operands))
            reads_all = node.func is scaled_dot_product_attention and not causal
            correlation = next(self.correlations, 0.0) if reads_all else None
            free = self.is_free(node)
            return Step(Counterpart(free, tied=tied, causal=causal, correlation=correlation))
        parameters = tuple(i for i, a in enumerate(node.args) if self.is_broadcast(a, node))
        scale = 1.0
        root = self.roots[node]
        if root is node:
            scale = self.scale_of(node, node.variables)
        elif self.ends(node) and not self.is_activation_alone(root):
            scale = self.scale_of(node, (root,))
        choice = self.is_choice(node)
        if scale == 1.0 and not parameters and not choice:
            return None
        if scale != 1.0 and node.is_view and node.is_overwritten:
            raise _written_view(node)
        return Step(Scaled(scale, parameters), choice=choice)

    def is_choice(self, node: Node) -> bool:
        """Whether a node is a part of a tensor, and the rest of the tensor has no use."""
        if node.name not in _CHOICES or len(node.variables) != 1 or node.output is not None:
            return False
        if node.is_view and node.is_overwritten:
            return False  # the write is meant for the source of the view too
        (source,) = node.variables
        fewer = node.shape.numel() < source.shape.numel()
        return fewer and node.args[0] is source and self.cuts.is_cut(source, node)

    def is_broadcast(self, x: Any, node: Node) -> bool:
        """Whether `x` is broadcast, and is a parameter without other uses, or rows of one that are
        chosen for this call alone. Its gradient is a sum, and nothing else depends on its scale."""
        if isinstance(x, Node):
            chosen = x.name == "embedding" and len(x.users) == 1
            chosen &= not any(is_shared(n) for n in x.operands if n.kind == PARAMETER)
            return chosen and x.shape.numel() < node.shape.numel()
        if not isinstance(x, Tensor) or x.numel() >= node.shape.numel():
            return False
        found = [n for n in node.operands if n.kind == PARAMETER and n.tensor is x]
        return bool(found) and not any(map(is_shared, found))

    def ends(self, node: Node) -> bool:
        """Whether a call outside the region uses the result, except as logits."""
        if node.returned:
            return True
        for user in node.users:
            if self.roots.get(user) is self.roots[node]:
                continue
            if user.name in _LOGITS:
                continue
            if user.is_border and len(user.variables) > 1:
                continue  # query times key
            if user.kind == VARIABLE:
                return True
        return False

    def is_activation_alone(self, root: Node) -> bool:
        done = self.done.get(root, [])
        return len(done) == 1 and done[0].family is Family.ACTIVATION

    def is_tied(self, parameter: Node) -> bool:
        """Whether calls look up rows of a parameter, and others multiply by it."""
        names = {user.name for user in uses_of(parameter) if user.is_border}
        return "embedding" in names and len(names) > 1

    def is_free(self, node: Node) -> bool:
        """Whether the gradient of each operand of a call may have a scale of its own."""
        return _has_constraint(node) and all(
            self.cuts.is_cut(operand, node) for operand in node.variables
        )

    # --- what Gaussians become ---------------------------------------------------------------

    def scale_of(self, node: Node, sources: tuple[Node, ...]) -> float:
        """Return 1 / RMS of the result for independent Gaussian sources, and 1 if this is near 1. A
        single number is a loss or a statistic, and is not scaled."""
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

    # --- additions to steps ------------------------------------------------------------------

    def add_arguments(self, steps: dict[Call, Step], node: Node) -> None:
        """The scale of a tensor that was written through a view. No call returns this tensor, so
        its users multiply it as an argument."""
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

    def add_shared(self, steps: dict[Call, Step]) -> None:
        """Parameters of several calls: their gradients have the same scale in all calls, or the
        true one."""
        seen: dict[Node, list[tuple[Node, Place]]] = {}
        for node in self.nodes:
            if node.output or _counterpart(steps, node) is None:
                continue
            for operand in dict.fromkeys(node.operands):
                owner = owner_of(operand)
                if owner is not None:
                    places = places_of(operand, node)
                    seen.setdefault(owner, []).extend((node, place) for place in places)
                    if not places and len({user.call for user in uses_of(owner)}) > 1:
                        _make_exact(steps, node)  # in a list, and other calls use it too
        for which, (owner, uses) in enumerate(seen.items()):
            users = {node for node, _ in uses}
            for node, place in uses:
                if not set(uses_of(owner)) <= users:
                    if _has_constraint(node):
                        _make_exact(steps, node)
                elif len(users) > 1:
                    _extend(steps, node, shared=((which, place),))

    def add_gradients(self, steps: dict[Call, Step]) -> None:
        """Gradients of parameters above an average. Such a gradient is a sum over positions, which
        all have one gradient, so the terms do not average out."""
        below = set(self.pools)
        for node in reversed(self.nodes):
            if any(user in below for user in node.users):
                below.add(node)
        for node in below - self.pools:
            for parameter in dict.fromkeys(node.operands):
                owner = owner_of(parameter)
                if owner is None or uses_of(owner) != [node] or node.call not in steps:
                    continue
                rms = self.gradients.get(id(owner.tensor), 1.0)
                places = places_of(parameter, node)
                if len(places) == 1 and not _LOW < rms < 1 / _LOW:
                    _extend(steps, node, delays=((places[0], 1 / rms),))

    def add_delays(self, steps: dict[Call, Step]) -> None:
        for node in self.nodes:
            work = _counterpart(steps, node)
            if work is not None and not work.free:
                for changed, fields in delays(node, work, self.cuts):
                    _extend(steps, changed, **fields)

    def add_residuals(self, steps: dict[Call, Step]) -> None:
        total = len(self.residual)
        for index, residual in enumerate(self.residual.values()):
            tau = self.rule(index, total)
            node, skip = residual.sum, residual.skip
            place = node.operands.index(skip)
            _extend(steps, node, work=Residual(index, place, tau, residual.waits))
            if residual.waits:
                _extend(steps, skip, split=Split(index, tau))
            of_branch, _ = residual_weights(tau)
            for user, entry in residual.entries:
                _extend(steps, user, delays=((entry, of_branch),))

    def add_writes(self, steps: dict[Call, Step]) -> None:
        for node in self.nodes:
            if node.call in steps and (node.in_place or node.is_overwritten):
                _extend(steps, node, in_place=node.in_place, overwritten=node.is_overwritten)


def _written_view(node: Node) -> UnsupportedError:
    return UnsupportedError(
        f"unit_scale: the model writes into a view, and one of the tensors that share its memory, "
        f"of shape {tuple(node.shape)}, needs a scale of its own, which the others must not have. "
        "Write out of place, y = y + z instead of y += z, or write into a copy"
    )


def _extend(steps: dict[Call, Step], node: Node, **fields: Any) -> None:
    """Set fields of a call's step. A tuple is appended to the present tuple."""
    assert node.call is not None
    step = steps.get(node.call, Step())
    for name, value in fields.items():
        before = getattr(step, name)
        fields[name] = before + value if isinstance(value, tuple) else value
    steps[node.call] = replace(step, **fields)


def _counterpart(steps: dict[Call, Step], node: Node) -> Counterpart | None:
    """Return the work of a call, if its unit-scaled counterpart takes its place."""
    work: Work | None = steps[node.call].work if node.call in steps else None
    return work if isinstance(work, Counterpart) else None


def _make_exact(steps: dict[Call, Step], node: Node) -> None:
    work = _counterpart(steps, node)
    assert work is not None
    _extend(steps, node, work=replace(work, exact=True))


def _has_constraint(node: Node) -> bool:
    """Whether the counterpart of a call can constrain the scales of its gradients."""
    return "constraint" in inspect.signature(COUNTERPARTS[node.func]).parameters


def _is_causal(node: Node) -> bool:
    """Whether no query of an attention reads a later key."""
    given = attention_options(node)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        return True
    if not isinstance(mask, Tensor) or mask.shape[-2] < 2:
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask < -_FILL
    later = (
        torch.ones(mask.shape[-2:], dtype=torch.float32).tril(mask.shape[-1] - mask.shape[-2]) == 0
    )
    return bool(later.any() and hidden.cpu()[..., later].all())


def _replayed(node: Node, sources: tuple[Node, ...]) -> float:
    """Return the RMS of `node` if each source is Gaussian: the recorded calls are made again."""
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
    """Return a source with unit RMS: Gaussian, or the result of a softmax of Gaussians."""
    assert source.layout is not None
    x = source.layout.gaussian(rng)
    if source.name != "softmax":
        return x
    shares = x.softmax(-1)
    return x.copy_(shares / shares.square().mean().sqrt())
