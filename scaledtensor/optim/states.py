"""Optimizers whose states and master weights are narrower than float32 numbers beside each weight.

`state_format` says what momenta are kept in:

  fp32              as torch has them
  bf16, fp16        16 bits, each group of 128 under a power of two
  e4m3fn, e5m2, int8   8 bits, each group of 128 widened to the range of the format (COAT, arXiv
                    2410.19313; `formats.expansion`)

`master_format` says what the value of a parameter is kept in:

  None              the parameter alone
  fp32              float32 beside a narrower parameter
  fp16              float16 under a power of two for each group of 128, rounded stochastically,
                    beside a narrower parameter (FP8-LM, arXiv 2310.18313, has one for a tensor)
  bf16              the bfloat16 parameter alone, rounded stochastically
  bf16+16           the bfloat16 parameter and the 16 bits that are missing to a float32: exactly
                    the float32 master, in half of its memory

Where all is fp32 and None, the step is torch's own. Random draws are a function of the group's
`seed`, which is drawn from torch's default generator at construction, and of the number of steps it
has taken; both are in the `state_dict`, so that a resumed run needs no generator's state.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from scaledtensor import _torch
from scaledtensor.errors import DTypeError, FormatError, UnsupportedError
from scaledtensor.formats import Format, FormatLike, from_dtype
from scaledtensor.formats import get as get_format
from scaledtensor.optim.buckets import (
    TOGETHER,
    Bucket,
    Entry,
    Parts,
    Scratch,
    groups_in,
    part,
    parts_of,
)
from scaledtensor.optim.files import (
    LARGEST_UNIT,
    LEAST_UNIT,
    adopted,
    exported,
    holds_groups,
    is_low,
)
from scaledtensor.optim.keeping import GROUP, MASTERS, STATE_FORMATS, STATE_ROUNDINGS, check_master
from scaledtensor.optim.updates import RULES, Plan, Units
from scaledtensor.tensors.coded import CodedTensor
from scaledtensor.tensors.expanded import ExpandedTensor
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["LowPrecision"]

#: Options of a parameter group that are of the optimizer at hand, whatever a file says.
OPTIONS = ("state_format", "state_rounding", "master_format")

#: From this many elements on, a step is compiled where nothing else is said: compiling takes as
#: long as a thousand steps of them.
COMPILED_FROM = 1 << 18

_DRAWN_MASTERS = ("bf16", "fp16")


class LowPrecision(Optimizer):
    """A mixin for optimizers of torch.optim's form, before them."""

    rule: ClassVar[str | None] = None
    """Which of `updates.RULES` steps it; None has torch's step on widened states."""

    own_step: ClassVar[bool] = False
    """Whether torch has no step of this optimizer."""

    compiled: bool | None = None

    _kept_as: tuple[Any, ...] = ()
    """The options of each group that its states were made under."""

    def _choose(
        self,
        state_format: FormatLike,
        state_rounding: str,
        master_format: FormatLike | None,
        compiled: bool | None,
    ) -> None:
        """Before the constructor of torch's class, which adds the groups."""
        if compiled not in (None, True, False):
            raise FormatError(f"compiled is True, False or None; got {compiled!r}")
        self.compiled = compiled
        chosen = (_named(state_format), state_rounding, _named(master_format))
        self._chosen = dict(zip(OPTIONS, chosen, strict=True)) | {"draws": 0}
        self._chosen["seed"] = int(torch.randint(1 << 62, ()))
        self._forget()

    def _forget(self) -> None:
        self._buckets: dict[Any, Bucket] = {}
        self._scratch = Scratch()

    def __getstate__(self) -> dict[str, Any]:
        own = {"compiled": self.compiled, "_chosen": self._chosen}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a pickle or a copy; and what `load_state_dict` of torch ends with."""
        incoming = getattr(self, "_incoming", None)
        before = self.param_groups if incoming is not None else ()
        super().__setstate__(state)
        self._forget()
        for old, group in zip(before, self.param_groups, strict=False):
            group.update({name: old[name] for name in OPTIONS})
        for group in self.param_groups:
            for name, chosen in self._chosen.items():
                group.setdefault(name, chosen)
        self.state.update(incoming or {})
        self._kept_as = self._formats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        full = self._chosen | param_group
        full.update({name: _named(full[name]) for name in ("state_format", "master_format")})
        _check_options(full, self.rule)
        _check_parameters(full["params"])
        super().add_param_group(full)

    # --- the step ----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, and what `closure` returned, if given.

        Raises:
            FormatError: a group was given a format that there is not, or a `master_format` in which
                the masters that it has cannot be kept. Nothing is changed then.
        """
        self._follow_options()
        if not self._steps_itself():
            return self._torchs_step()(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self.rule is None:
                self._step_widened()
            else:
                self._step_fused(self.rule)
        return loss

    def _formats(self) -> tuple[Any, ...]:
        return tuple(tuple(group[name] for name in OPTIONS) for group in self.param_groups)

    def _follow_options(self) -> None:
        """States go into the formats of their groups, where somebody has changed these since the
        step before."""
        now = self._formats()
        if now == self._kept_as:
            return
        for group in self.param_groups:
            named = {name: _named(group[name]) for name in ("state_format", "master_format")}
            _check_options(group | named, self.rule)
            group.update(named)
        states = adopted(self, self.state_dict(), self._steps_itself())
        self.state.update(states)
        self._forget()
        self._kept_as = self._formats()

    def _steps_itself(self) -> bool:
        """Whether torch's own step does not do."""
        return self.own_step or any(map(is_low, self.param_groups))

    def _torchs_step(self) -> Any:
        """That of torch's class, without the hooks that torch puts around it: they are around the
        one here already."""
        step = super().step.__func__  # type: ignore[attr-defined]
        return inspect.unwrap(step, stop=lambda f: not getattr(f, "hooked", False))

    def _step_fused(self, rule: str) -> None:
        entries = [e for group in self.param_groups for e in self._entries(rule, group)]
        elements = sum(e.elements.numel() for e in entries)
        compiled = elements >= COMPILED_FROM if self.compiled is None else self.compiled
        torch.autograd.graph.increment_version([e.owner for e in entries])
        used = {}
        stepped: list[Entry] = []
        try:
            for number, batch in enumerate(_batches(entries)):
                key = (batch[0].plan, *(id(e.owner) for e in batch))
                bucket = self._buckets.get(key)
                if bucket is None or not bucket.holds(batch):
                    bucket = Bucket(batch[0].plan, batch)
                    bucket.adopt(batch)
                used[key] = bucket
                self._step_bucket(bucket, batch, number, compiled)
                stepped += batch
        finally:  # a later one may fail to compile: what was stepped counts as that
            if RULES[rule].counts:
                _torch.foreach_increment([e.state["step"] for e in stepped])
        self._buckets = used
        for group in {id(e.group): e.group for e in entries}.values():
            group["draws"] += 1

    def _step_bucket(
        self, bucket: Bucket, entries: list[Entry], number: int, compiled: bool
    ) -> None:
        plan, rule = bucket.plan, RULES[bucket.plan.rule]
        numbers: list[list[float]] = []
        known: dict[Any, list[float]] = {}
        for entry in entries:
            count = entry.state["step"].item() + 1 if rule.counts else 0.0
            key = (id(entry.group), count, entry.first, entry.units)
            if key not in known:
                found = rule.numbers(entry.group, count, entry.first, entry.units)
                found["unit"] = entry.units.value
                known[key] = [found[name] for name in plan.columns]
            numbers.append(known[key])
        keys = _keys(entries[0].group, number, plan.draws, bucket.device) if plan.draws else None
        bucket.step(entries, numbers, self._scratch, keys, compiled)

    def _entries(self, rule: str, group: dict[str, Any]) -> Iterator[Entry]:
        """Raises what is wrong with a parameter or its gradient, before anything is changed."""
        its = RULES[rule]
        names, flags = its.states(group), its.flags(group)
        stochastic = group["state_rounding"] == "stochastic" and group["state_format"] != "fp32"
        plans: dict[tuple[str, str], Plan] = {}
        for owner in group["params"]:
            if owner.grad is None:
                continue
            p, grad = part(owner), part(owner.grad)
            check_tensor("a parameter", p)
            check_tensor("the gradient of a parameter", grad)
            if isinstance(grad, CodedTensor):
                grad = grad.widened()
            elements, fmt = _elements(p)
            gradient, grad_format = _elements(grad)
            kinds = (fmt.name, grad_format.name)
            plan = plans.get(kinds)
            if plan is None:
                master = group["master_format"]
                check_master(master, fmt, tuple(p.shape))
                how = (group["state_format"], stochastic, master)
                plan = plans[kinds] = Plan(rule, flags, names, its.columns, *how, *kinds)
            state = parts_of(self.state, owner)
            # A part's scale is the whole's, once parts have agreed on it.
            scaled = isinstance(p, ScaledTensor)
            fresh = scaled and not p.agreed and not p.rms.item()
            units = Units(
                value=p.scale.item() if scaled and not fresh else 1.0,
                gradient=grad.scale.item() if isinstance(grad, ScaledTensor) else 1.0,
                moment=_unit(state, names, grad),
            )
            first = not any(name in state for name in names)
            yield Entry(owner, p, state, group, plan, elements, gradient, units, fresh, first)

    # --- torch's step on widened states ------------------------------------------------------

    def _step_widened(self) -> None:
        """One parameter at a time, so that few states are wide at once."""
        step = self._torchs_step()
        whole = self.param_groups
        for number, (p, group) in enumerate(list(self._stepped())):
            held = dict(self.state.get(p, {}))
            self.state[p].update({name: _widened(x, p) for name, x in held.items()})
            self.param_groups = [{**group, "params": [p]}]
            try:
                inspect.unwrap(step)(self)
            except BaseException:
                self.state[p] = held
                raise
            finally:
                self.param_groups = whole
            self._narrow(p, self.state[p], group, _keys(group, number, 1, p.device)[0])
        for group in whole:
            group["draws"] += 1

    def _stepped(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    for name, x in (("a parameter", p), ("the gradient of a parameter", p.grad)):
                        check_tensor(name, x)
                    yield p, group

    def _narrow(self, p: Tensor, state: dict[str, Any], group: dict[str, Any], key: Tensor) -> None:
        if group["state_format"] == "fp32":
            return
        for name, x in state.items():
            if name != "step" and isinstance(x, Tensor) and not isinstance(x, ExpandedTensor):
                drawn = group["state_rounding"] == "stochastic"
                state[name] = ExpandedTensor(
                    x.dequantize() if isinstance(x, ScaledTensor) else x,
                    group["state_format"],
                    dtype=torch.float32,
                    tensor_scale=x.scale if isinstance(x, ScaledTensor) else 1.0,
                    rounding="stochastic" if drawn else "nearest_even",
                    generator=key if drawn else None,
                )

    # --- files -------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any) -> None:
        """As torch's. States come back to the bit where they were saved in the format of this
        optimizer, else their values are rounded to it, as are those that torch.optim's classes
        saved. Formats, rounding and `compiled` stay those of this optimizer.

        Raises:
            ShapeError, FormatError: a state does not fit its parameter, or a master was saved that
                this optimizer has no place for. Nothing is changed then.
        """
        taken: dict[Tensor, dict[str, Any]] = {}

        def take(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            if not self._steps_itself() and not holds_groups(given):
                return given
            taken.update(adopted(self, given, self._steps_itself()))
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
        """`state_dict()` in the layout of torch.optim's own classes, which load it: states as
        float32 tensors, or as ordinary ScaledTensors where parameters are such, and nothing of
        masters."""
        return exported(self)


def _named(option: FormatLike | None) -> str | None:
    """The name of a format, which is what groups and files keep."""
    if isinstance(option, str):
        return option.lower()  # a master may be none of the formats: "bf16+16"
    return None if option is None else get_format(option).name


def _check_options(group: dict[str, Any], rule: str | None) -> None:
    for name, allowed in zip(
        OPTIONS, (STATE_FORMATS, STATE_ROUNDINGS, tuple(MASTERS)), strict=True
    ):
        if group[name] not in allowed:
            raise FormatError(
                f"{name} is one of {', '.join(map(repr, allowed))}; got {group[name]!r}"
            )
    if rule is None and group["master_format"] is not None:
        raise FormatError(
            "Muon has no masters, since its products are bfloat16 anyway: master_format=None; got "
            f"{group['master_format']!r}"
        )
    if not is_low(group):
        return
    for name in ("fused", "capturable", "differentiable"):
        if group.get(name):
            raise UnsupportedError(
                f"{name}=True is of torch's own step, which has float32 states and no masters; "
                "leave it out, or take state_format='fp32' and master_format=None"
            )


def _check_parameters(params: Any) -> None:
    """Raises UnsupportedError for a parameter that no step can write into."""
    for entry in [params] if isinstance(params, Tensor) else params:
        p = entry[1] if isinstance(entry, tuple) else entry
        own = part(p) if isinstance(p, Tensor) else p
        if isinstance(own, CodedTensor) and p.requires_grad:
            raise UnsupportedError(
                f"a parameter of shape {tuple(p.shape)} is a {type(own).__name__}, whose codes and "
                "scales are made together, so that no step can write into it: train x.widened(), "
                "and keep the result by scaledtensor.scaled(result, format, granularity=...); or "
                "freeze it by requires_grad_(False)"
            )


def check_tensor(name: str, x: Tensor) -> None:
    """Raises UnsupportedError or DTypeError where a step in low precision cannot take `x`."""
    if x.layout != torch.strided:
        raise UnsupportedError(
            f"steps in low precision take dense tensors; {name} of shape {tuple(x.shape)} is "
            f"{x.layout}. For an embedding, sparse=False"
        )
    if not isinstance(x, ScaledTensor) and type(x) not in (Tensor, torch.nn.Parameter):
        raise UnsupportedError(
            f"steps in low precision take plain tensors and ScaledTensors; {name} of shape "
            f"{tuple(x.shape)} is a {type(x).__name__}"
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise DTypeError(
            "steps in low precision compute in float32 and take float32, bfloat16 and float16; "
            f"{name} of shape {tuple(x.shape)} is {x.dtype}"
        )


def _unit(state: Parts, names: tuple[str, ...], grad: Tensor) -> float:
    held = state.get(names[0]) if names else None
    if isinstance(held, ExpandedTensor):
        return float(held.tensor_scale)
    if isinstance(held, ScaledTensor):
        return float(held.scale)
    if held is not None or not isinstance(grad, ScaledTensor):
        return 1.0
    return min(max(float(grad.scale), LEAST_UNIT), LARGEST_UNIT)


def _elements(x: Tensor) -> tuple[Tensor, Format]:
    if isinstance(x, ScaledTensor):
        return x.qdata, x.format
    return x, from_dtype(x.dtype)


def _batches(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Entries that are stepped at once."""
    open_: dict[Any, tuple[list[Entry], int]] = {}
    for entry in entries:
        if entry.alone:
            yield [entry]
            continue
        key = (entry.plan, entry.elements.device)
        batch, size = open_.get(key, ([], 0))
        more = groups_in(entry.parameter) * GROUP
        if batch and size + more > TOGETHER:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        open_[key] = batch, size + more
    for batch, _ in open_.values():
        yield batch


_MASK = (1 << 64) - 1


def _keys(group: dict[str, Any], number: int, count: int, device: torch.device) -> Tensor:
    """Keys of the draws of one step of one bucket: splitmix64 (Steele et al. 2014, OOPSLA) of the
    seed, at a place of its own for each."""
    words = []
    for i in range(count):
        place = ((group["draws"] << 24) + (number << 8) + i) * 0x9E3779B97F4A7C15
        z = (group["seed"] + place) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
        words.append([(z >> 32) - (1 << 31), (z & 0xFFFFFFFF) - (1 << 31)])
    return torch.tensor(words, dtype=torch.int32, device=device)


def _widened(x: Any, p: Tensor) -> Any:
    if not isinstance(x, ExpandedTensor):
        return x
    return x.widened() if isinstance(p, ScaledTensor) else x.dequantize()
