"""The step of an optimizer whose states and masters may be narrower than float32.

From parameters to new parameters a step goes through these files:

1. `step.py` reads the parameters that have gradients: an `Entry` for each.
2. `buckets.py` divides the entries into buckets, and copies elements into flat memory.
3. `kernel.py` reads states and values, applies the update, and writes both. On a CPU, `loops.py`
   does this in one C++ loop.
4. `states.py` and `masters.py` have the formats, and `updates.py` has the optimizers' updates.

Muon's step stays torch's: it runs on one parameter at a time, with states widened to float32.
`options.py` has the options, `groups.py` the learning rates, and `files.py` the `state_dict`.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from scaledtensor import _torch
from scaledtensor.errors import FormatError
from scaledtensor.formats import Format, from_dtype
from scaledtensor.native import PLAIN
from scaledtensor.optim.buckets import Bucket, Entry, Scratch, batches, part, stands_alone
from scaledtensor.optim.files import exported, holds_groups, loaded_states, widened
from scaledtensor.optim.groups import GroupRule, LRScale, groups_of
from scaledtensor.optim.kernel import Plan
from scaledtensor.optim.masters import check_master
from scaledtensor.optim.options import (
    FORMATS,
    Options,
    check_group,
    check_parameters,
    check_tensor,
    is_low,
)
from scaledtensor.optim.states import LARGEST_UNIT, LEAST_UNIT, unit_of, values_of
from scaledtensor.optim.updates import RULES, Group, Units
from scaledtensor.tensors.coded import CodedTensor, is_expanded
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["LowPrecision"]

#: From this number of elements on, `compiled=None` compiles: compiling takes as long as a thousand
#: steps of so many elements.
COMPILED_FROM = 1 << 18


class LowPrecision(Optimizer):
    """A mixin in front of an optimizer with the form of torch.optim's."""

    rule: ClassVar[str | None] = None
    """Name of the update in `RULES`; None uses torch's step on widened states."""

    own_step: ClassVar[bool] = False
    """Whether torch has no step of this optimizer."""

    compiled: bool | None = None

    _rule: GroupRule
    _kept_as: tuple[Any, ...] = ()
    """The formats of each group in which the present states are kept."""

    # --- construction ------------------------------------------------------------------------

    def _prepare(
        self, params: ParamsT, lr_scale: LRScale, options: Options, torchs_decay: float
    ) -> tuple[list[Group], float]:
        """Runs before the constructor of torch's class, which adds the groups.

        Returns:
            The parameter groups, and the weight decay.
        """
        groups = groups_of(params)
        self._rule = GroupRule.of(
            groups,
            lr_scale,
            options.independent_weight_decay,
            options.allow_non_unit_scaling_params,
        )
        if options.compiled not in (None, True, False):
            raise FormatError(f"compiled is True, False or None; got {options.compiled!r}")
        self.compiled = options.compiled
        self._chosen = options.of_groups() | {"draws": 0, "seed": int(torch.randint(1 << 62, ()))}
        self._forget()
        if options.weight_decay is not None:
            return groups, options.weight_decay
        return groups, 0.0 if self._rule.scales else torchs_decay

    def _forget(self) -> None:
        self._buckets: dict[Any, Bucket] = {}
        self._scratch = Scratch()

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, split into one group for each learning rate."""
        for group in self._rule.split(self.defaults | param_group):
            full = self._chosen | group
            full |= check_group(full, self.rule)
            check_parameters(full["params"])
            super().add_param_group(full)

    def __getstate__(self) -> dict[str, Any]:
        own = {"compiled": self.compiled, "_chosen": self._chosen, "_rule": self._rule}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickle or a copy. torch's `load_state_dict` ends with it too."""
        incoming = getattr(self, "_incoming", None)
        before = self.param_groups if incoming is not None else ()
        super().__setstate__(state)
        self._forget()
        for old, group in zip(before, self.param_groups, strict=False):
            group.update({name: old[name] for name in FORMATS})
        for group in self.param_groups:
            for name, chosen in self._chosen.items():
                group.setdefault(name, chosen)
        self.state.update(incoming or {})
        self._kept_as = self._formats()

    # --- the step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, and return the result of `closure`, if given.

        Raises:
            FormatError: a group was given an unknown format, or a `master_format` that cannot keep
                the group's masters. Nothing is changed then.
        """
        self._follow_options()
        if not self._steps_itself():
            return self._torchs_step()(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step_itself()
        return loss

    # A compiled step would be operators on the codes of each state. The loops of C++ are faster,
    # and Dynamo cannot trace the tensors that hold codes.
    @_torch.uncompiled
    def _step_itself(self) -> None:
        if self.rule is None:
            self._step_widened()
        else:
            self._step_fused(self.rule)

    def _formats(self) -> tuple[Any, ...]:
        return tuple(tuple(group[name] for name in FORMATS) for group in self.param_groups)

    def _follow_options(self) -> None:
        """Convert the states if the format of a group was changed since the last step."""
        if self._formats() == self._kept_as:
            return
        for group in self.param_groups:
            group.update(check_group(group, self.rule))
        self.state.update(loaded_states(self, self.state_dict(), self._steps_itself()))
        self._forget()
        self._kept_as = self._formats()

    def _steps_itself(self) -> bool:
        """Whether torch's own step cannot make the step."""
        return self.own_step or any(map(is_low, self.param_groups))

    def _torchs_step(self) -> Any:
        """Return the step of torch's class, without the hooks that torch puts around it: they are
        around `step` already."""
        step = super().step.__func__  # type: ignore[attr-defined]
        return inspect.unwrap(step, stop=lambda f: not getattr(f, "hooked", False))

    def _step_fused(self, rule: str) -> None:
        entries = [e for group in self.param_groups for e in self._entries(rule, group)]
        elements = sum(e.elements.numel() for e in entries)
        compiled = elements >= COMPILED_FROM if self.compiled is None else self.compiled
        loops = self.compiled is not True
        # Compiled code saved the elements, and not the parameter (`count_write`).
        torch.autograd.graph.increment_version([x for e in entries for x in (e.owner, e.elements)])
        used = {}
        stepped: list[Entry] = []
        try:
            for number, batch in enumerate(batches(entries)):
                plan = batch[0].plan
                key = (plan, *(id(e.owner) for e in batch))
                bucket = self._buckets.get(key)
                if bucket is None or not bucket.holds(batch):
                    bucket = Bucket(plan, batch)
                used[key] = bucket
                keys = _keys(batch[0].group, number, plan.draws, bucket.device)
                bucket.step(batch, _numbers(batch), self._scratch, keys, compiled, loops)
                stepped += batch
        finally:  # a later bucket may fail to compile: the steps before it count
            if RULES[rule].counts:
                _torch.foreach_increment([e.state["step"] for e in stepped])
        self._buckets = used
        for group in {id(e.group): e.group for e in entries}.values():
            group["draws"] += 1

    def _entries(self, rule: str, group: Group) -> Iterator[Entry]:
        """Read the parameters of a group. Every error is raised before anything is changed."""
        its = RULES[rule]
        names, flags, master = its.states(group), its.flags(group), group["master_format"]
        stochastic = group["state_rounding"] == "stochastic" and group["state_format"] != "fp32"
        plans: dict[tuple[str, str], Plan] = {}
        for owner in group["params"]:
            if owner.grad is None:
                continue
            p, elements, fmt = _seen("a parameter", owner)
            grad, gradient, grad_format = _seen("the gradient of a parameter", owner.grad)
            kinds = (fmt.name, grad_format.name)
            if kinds not in plans:
                check_master(master, fmt, tuple(p.shape))
                how = (group["state_format"], stochastic, master)
                plans[kinds] = Plan(rule, flags, names, its.columns, *how, *kinds)
            fresh, value = False, 1.0
            if p is not elements:  # a ScaledTensor
                # A part whose ranks agreed on a scale keeps this scale.
                fresh = not p.memo.agreed and not p.rms.item()
                value = 1.0 if fresh else p.scale.item()
            state = self.state[owner]
            first = state.keys().isdisjoint(names)
            unit = 1.0 if grad is gradient else unit_of(grad)
            units = Units(value, unit, _moment_unit(state, names, unit))
            alone = stands_alone(elements, gradient, fresh)
            what = (owner, p, state, group, plans[kinds], elements, gradient)
            yield Entry(*what, units, fresh, first, alone)

    # --- torch's step on widened states ------------------------------------------------------

    def _step_widened(self) -> None:
        """Step one parameter at a time, so that few states are wide at once."""
        step = inspect.unwrap(self._torchs_step())
        whole = self.param_groups
        stepped = [(p, group) for group in whole for p in group["params"] if p.grad is not None]
        for p, _ in stepped:
            check_tensor("a parameter", p)
            check_tensor("the gradient of a parameter", p.grad)
        for number, (p, group) in enumerate(stepped):
            held = dict(self.state.get(p, {}))
            self.state[p].update({name: widened(x, p) for name, x in held.items()})
            self.param_groups = [{**group, "params": [p]}]
            try:
                step(self)
            except BaseException:
                self.state[p] = held
                raise
            finally:
                self.param_groups = whole
            if group["state_format"] != "fp32":
                drawn = group["state_rounding"] == "stochastic"
                keys = _keys(group, number, drawn, p.device)
                _narrow(self.state[p], group["state_format"], None if keys is None else keys[0])
        for group in whole:
            group["draws"] += 1

    # --- files -------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a `state_dict` of this class or of torch's class.

        States in the format of this optimizer come back to the bit. The values of all others are
        rounded to this format. Formats, rounding and `compiled` stay as this optimizer has them.

        Raises:
            ShapeError, FormatError: a state does not fit its parameter, or the file has a master
                that this optimizer does not have. Nothing is changed then.
        """
        taken: dict[Tensor, dict[str, Any]] = {}

        def take(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            if not self._steps_itself() and not holds_groups(given):
                return given
            taken.update(loaded_states(self, given, self._steps_itself()))
            places = [i for group in given["param_groups"] for i in group["params"]]
            others = {k: v for k, v in given["state"].items() if k not in places}
            return {**given, "state": others}

        self._incoming = taken
        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            del self._incoming

    def plain_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` in the layout of torch.optim's classes, which can load it: states
        are float32 tensors, or ordinary ScaledTensors if the parameters are, and masters are left
        out."""
        return exported(self)


def _numbers(entries: list[Entry]) -> list[list[float]]:
    """Return the columns of each parameter; parameters with equal numbers share one list."""
    plan, rule = entries[0].plan, RULES[entries[0].plan.rule]
    known: dict[Any, list[float]] = {}
    numbers = []
    for entry in entries:
        count = entry.state["step"].item() + 1 if rule.counts else 0.0
        key = (id(entry.group), count, entry.first, entry.units)
        if key not in known:
            found = rule.numbers(entry.group, count, entry.first, entry.units)
            found["unit"] = entry.units.value
            known[key] = [found[name] for name in plan.columns]
        numbers.append(known[key])
    return numbers


def _moment_unit(state: dict[str, Any], names: tuple[str, ...], of_gradient: float) -> float:
    """Return the unit of the states: of the present states, or of the first gradient."""
    held = state.get(names[0]) if names else None
    if held is not None:
        return unit_of(held if type(held) is CodedTensor else part(held))
    return min(max(of_gradient, LEAST_UNIT), LARGEST_UNIT)


def _seen(name: str, x: Tensor) -> tuple[Any, Tensor, Format]:
    """Return this rank's part of a parameter or a gradient, its elements, and their format. A plain
    tensor is its own elements."""
    own = x if type(x) in PLAIN else part(x)
    check_tensor(name, own)
    if type(own) in PLAIN:
        return own, own, from_dtype(own.dtype)
    # A gradient may be a CodedTensor. `check_parameters` refuses such a parameter.
    scaled: ScaledTensor = cast(Ruled, own).widened()
    return scaled, scaled.qdata, scaled.format


def _narrow(state: dict[str, Any], name: str, key: Tensor | None) -> None:
    """Convert the states that torch's step left to the state format `name`; with `key`, rounded
    stochastically."""
    for state_name, x in state.items():
        if state_name != "step" and isinstance(x, Tensor) and not is_expanded(x):
            state[state_name] = CodedTensor.expanded(
                values_of(x),
                name,
                dtype=torch.float32,
                tensor_scale=x.scale if isinstance(x, ScaledTensor) else 1.0,
                rounding="nearest_even" if key is None else "stochastic",
                generator=key,
            )


_MASK = (1 << 64) - 1


def _keys(group: Group, number: int, count: int, device: torch.device) -> Tensor | None:
    """Return `count` keys for the draws of one step of one bucket: splitmix64 (Steele et al. 2014,
    OOPSLA) of the group's seed, each at another place. None if `count` is 0."""
    if not count:
        return None
    words = []
    for i in range(count):
        place = ((group["draws"] << 24) + (number << 8) + i) * 0x9E3779B97F4A7C15
        z = (group["seed"] + place) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
        words.append([(z >> 32) - (1 << 31), (z & 0xFFFFFFFF) - (1 << 31)])
    return torch.tensor(words, dtype=torch.int32, device=device)
