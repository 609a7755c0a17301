"""The time steps of an LSTM, a GRU and a tanh network on plain float32 elements, and their RMS.

A step multiplies the state of the step before it, rounded to the format of the recipe, by a matrix.
Everything else in a step is float32, and states are written in the dtype of activations. When the
backward pass starts, all states are known. So it calculates the gates, and the factors of the
gradients, for all steps at once. The loop of the backward pass multiplies the gradient of each
step's product by the same matrix. This gradient is not rounded to 8 bits.

All tensors are flat: (rows, features), with one row for each step of each sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scaledtensor.ops.rules.activation import sigmoid_rms, tanh_rms
from scaledtensor.scales.powers import quadrature
from scaledtensor.scales.singles import ONE, Single

__all__ = ["KINDS", "Expected", "Kind", "Order", "Product", "State"]


class Order(NamedTuple):
    """The order of the steps."""

    sizes: tuple[int, ...]
    """Rows of each step, in the order of time. They never grow: sequences end, and none starts."""
    backwards: bool

    @property
    def steps(self) -> range:
        steps = range(len(self.sizes))
        return steps[::-1] if self.backwards else steps

    @property
    def back(self) -> range:
        return self.steps[::-1]

    def before(self, step: int) -> int:
        """Return the step that runs before this one; a number that is no step for the first."""
        return step + 1 if self.backwards else step - 1

    def shared(self, step: int) -> int:
        """Return the number of rows that a step has in common with the step before it."""
        before = self.before(step)
        return min(self.sizes[step], self.sizes[before]) if before in self.steps else 0

    def cut(self, x: Tensor) -> Sequence[Tensor]:
        """Return a view of the rows of each step."""
        found: Sequence[Tensor] = x.split(self.sizes)
        return found

    def earlier(self, x: Tensor, start: Tensor) -> Tensor:
        """Return the states before each step, from the states after each step."""
        parts, found = self.cut(x), []
        for step, n in enumerate(self.sizes):
            shared = self.shared(step)
            if shared:
                found.append(parts[self.before(step)][:shared])
            if shared < n:
                found.append(start[shared:n])
        return torch.cat(found)

    def passed(
        self, grads: Sequence[Tensor], step: int, first: Tensor
    ) -> list[tuple[slice, Tensor]]:
        """Return the gradients of the states before a step, with their rows in the step: a part of
        `grads`, a part of `first` (the gradient of the initial state), or both."""
        shared, n = self.shared(step), self.sizes[step]
        found = []
        if shared:
            found.append((slice(shared), grads[self.before(step)][:shared]))
        if shared < n:
            found.append((slice(shared, n), first[shared:n]))
        return found

    def last(self, x: Tensor) -> Tensor:
        """Return the last state of each sequence, in new memory."""
        if self.backwards:
            return x[: self.sizes[0]].clone()
        ends = [*self.sizes[1:], 0]
        parts = zip(self.cut(x), self.sizes, ends, strict=True)
        return torch.cat([part[end:] for part, n, end in reversed(list(parts)) if end < n])


State = Sequence[Tensor]
"""(h,) or, for an LSTM, (h, c); each is (sequences, width)."""

Round = Callable[[Tensor], Tensor]
"""Elements -> the nearest values of a format, in the dtype of products."""


class Product(NamedTuple):
    """The product with the recurrent weight: `round(x) @ matrix + bias`, in float32."""

    matrix: Tensor
    round: Round
    unit: Single = ONE
    """The scale under which `round` rounds, which `matrix` contains."""
    bias: Tensor | None = None

    def of_rounded(self, q: Tensor) -> Tensor:
        """Return the product of elements that are rounded already."""
        if self.bias is not None and q.dtype is torch.float32:
            return torch.addmm(self.bias, q, self.matrix)
        y = torch.mm(q, self.matrix).float()
        return y if self.bias is None else y + self.bias

    def add_to(self, z: Tensor, q: Tensor) -> None:
        """Add the same, without a bias, to `z`."""
        if q.dtype is torch.float32:
            z.addmm_(q, self.matrix)
        else:
            # A sum of two dtypes takes torch three times as long.
            z.add_(torch.mm(q, self.matrix).float())


Factors = tuple[Tensor, ...]
"""Factors of gradients, each (rows, features). Each kind has its own."""


class Expected(NamedTuple):
    """Expected RMS of the states and the cells of a layer."""

    h: Single
    c: Single


def _settled(
    step: Callable[..., tuple[Single, ...]], steps: int, *first: Single
) -> tuple[Single, ...]:
    """Return the RMS after so many steps, from the RMS before them. They mostly settle soon."""
    now = first
    for _ in range(steps):
        before, now = now, step(*now)
        if all(abs(a - b) <= b * 2.0**-10 for a, b in zip(before, now, strict=True)):
            break
    return now


class Kind(ABC):
    """One kind of recurrent layer."""

    #: Whether the biases of input and state can be added to each other.
    one_bias = True

    @abstractmethod
    def run(
        self, z: Tensor, order: Order, product: Product, start: State, q: Tensor, hs: Tensor
    ) -> Tensor | None:
        """Write the states after each step into `hs`, and return the cells.

        Args:
            z: The terms of the gates that do not depend on a state, which this call overwrites.
            order: The order of the steps.
            product: The product with the recurrent weight.
            start: The initial state.
            q: The rounded initial state, in the unit of `product.matrix`.
            hs: Memory for the states, (rows, width), in the dtype of activations.
        """

    @abstractmethod
    def factors(self, z: Tensor, y: Tensor, earlier: Tensor, after: Tensor) -> Factors:
        """Return the factors of the backward loop. `y` is the product with the recurrent weight.
        `earlier` and `after` are the states before and after each step; for an LSTM, the cells.
        This call overwrites `z`."""

    @abstractmethod
    def back(
        self, factors: Factors, order: Order, product: Product, grad: Tensor, last: State
    ) -> tuple[Tensor, Tensor, State]:
        """Return the gradients of the gates, of the product with the recurrent weight, and of the
        initial state.

        Args:
            factors: The factors.
            order: The order of the steps.
            product: The product with the transposed weight.
            grad: Gradients of the states after each step, which this call overwrites.
            last: Gradients of the last states.
        """

    @abstractmethod
    def expected(self, gates: Single, weight: Single, start: Single, steps: int) -> Expected:
        """Return the RMS of a layer after some steps. `weight` is the RMS of the product with a
        state of RMS 1, and `start` the RMS of the first cells or states."""


def _fitted(x: Tensor, start: Tensor, n: int) -> Tensor:
    """Return a state for a step of `n` rows: sequences that end leave, and others start."""
    rows = x.shape[0]
    if rows == n:
        return x
    return x[:n] if rows > n else torch.cat((x, start[rows:n]))


def _empty(like: Tensor, width: int) -> Tensor:
    return torch.empty(like.shape[0], width, dtype=torch.float32, device=like.device)


def _with_last(grad: Sequence[Tensor], last: Tensor, order: Order) -> None:
    """Add the gradients of the last states to the gradients of the states after each step."""
    shared = 0
    for step in order.back:
        n = order.sizes[step]
        if n > shared:
            grad[step][shared:].add_(last[shared:n])
        shared = order.shared(step)


class _Lstm(Kind):
    """Runs i, f, g, o = z + W h in torch's order; c = f c + i g; h = o tanh(c), with sigmoids of i,
    f and o and a tanh of g (Hochreiter and Schmidhuber 1997)."""

    def run(
        self, z: Tensor, order: Order, product: Product, start: State, q: Tensor, hs: Tensor
    ) -> Tensor | None:
        _, c = start
        width = hs.shape[1]
        cells = _empty(z, width)
        gates, states, cs = order.cut(z), order.cut(hs), order.cut(cells)
        i, f, g, o = (order.cut(part) for part in z.split(width, 1))
        q0, c0 = q, c
        for t in order.steps:
            n = order.sizes[t]
            product.add_to(gates[t], _fitted(q, q0, n))
            new = g[t].tanh()
            gates[t].sigmoid_()
            c = torch.mul(f[t], _fitted(c, c0, n), out=cs[t]).addcmul_(i[t], new)
            q = product.round(torch.mul(o[t], c.tanh(), out=states[t]))
        return cells

    def factors(self, z: Tensor, y: Tensor, earlier: Tensor, after: Tensor) -> Factors:
        width = z.shape[1] // 4
        new = z.add_(y)[:, 2 * width : 3 * width].tanh()
        i, f, _, o = z.sigmoid_().split(width, 1)
        held = after.tanh()
        by_cell = (new * i * (1 - i), earlier * f * (1 - f), i * (1 - new.square()))
        return held * o * (1 - o), torch.stack(by_cell, 1), o * (1 - held.square()), f

    def back(
        self, factors: Factors, order: Order, product: Product, grad: Tensor, last: State
    ) -> tuple[Tensor, Tensor, State]:
        dh_last, dc_last = last
        width = grad.shape[1]
        made = _empty(grad, 4 * width)
        dz, of_output = order.cut(made), order.cut(made[:, 3 * width :])
        of_cell = order.cut(made[:, : 3 * width].view(-1, 3, width))
        dhs, by_state, by_cell, cell, kept = (order.cut(x) for x in (grad, *factors))
        _with_last(dhs, dh_last, order)
        dc, first, dc_first = dc_last[:0], torch.zeros_like(dh_last), torch.zeros_like(dc_last)
        for t in order.back:
            dh = dhs[t]
            dc = torch.addcmul(_fitted(dc, dc_last, order.sizes[t]), dh, cell[t])
            torch.mul(by_cell[t], dc.unsqueeze(1), out=of_cell[t])
            torch.mul(by_state[t], dh, out=of_output[t])
            dc = dc.mul_(kept[t])
            q = product.round(dz[t])
            for rows, dh in order.passed(dhs, t, first):
                product.add_to(dh, q[rows])
            shared = order.shared(t)
            dc_first[shared : len(dc)] = dc[shared:]
        return made, made, (first, dc_first)

    def expected(self, gates: Single, weight: Single, start: Single, steps: int) -> Expected:
        def step(z: Single, h: Single, c: Single) -> tuple[Single, ...]:
            z = quadrature(gates, h * weight)
            s = sigmoid_rms(z)
            c = quadrature(s * c, s * tanh_rms(z))
            return z, s * tanh_rms(c), c

        _, h, c = _settled(step, steps, gates, ONE * 0, start)
        return Expected(h, c)


class _Gru(Kind):
    """Runs r, u, n = z + W h, where r multiplies the product in n; h = n + u (h - n) (Cho et al.
    2014, with the reset after the product, as in torch)."""

    one_bias = False

    def run(
        self, z: Tensor, order: Order, product: Product, start: State, q: Tensor, hs: Tensor
    ) -> Tensor | None:
        width = hs.shape[1]
        both, new = (order.cut(z[:, part]) for part in (slice(2 * width), slice(2 * width, None)))
        states = order.cut(hs)
        reset, update = (order.cut(part) for part in z[:, : 2 * width].split(width, 1))
        (h,) = start
        q0, h0 = q, h
        for t in order.steps:
            n = order.sizes[t]
            y = product.of_rounded(_fitted(q, q0, n))
            both[t].add_(y[:, : 2 * width]).sigmoid_()
            candidate = torch.addcmul(new[t], reset[t], y[:, 2 * width :]).tanh_()
            h = torch.lerp(candidate, _fitted(h, h0, n), update[t])
            q = product.round(states[t].copy_(h))
        return None

    def factors(self, z: Tensor, y: Tensor, earlier: Tensor, after: Tensor) -> Factors:
        width = z.shape[1] // 3
        r, u = z[:, : 2 * width].add_(y[:, : 2 * width]).sigmoid_().split(width, 1)
        read = y[:, 2 * width :]
        new = torch.addcmul(z[:, 2 * width :], r, read).tanh_()
        of_new = (1 - u) * (1 - new.square())
        by_state = (of_new * read * r * (1 - r), (earlier - new) * u * (1 - u), of_new)
        return torch.stack(by_state, 1), u, r

    def back(
        self, factors: Factors, order: Order, product: Product, grad: Tensor, last: State
    ) -> tuple[Tensor, Tensor, State]:
        (dh_last,) = last
        width = grad.shape[1]
        made, of_product = _empty(grad, 3 * width), _empty(grad, 3 * width)
        dz, dy, of_read = map(order.cut, (made, of_product, of_product[:, 2 * width :]))
        dhs, by_state, kept, reset = (order.cut(x) for x in (grad, *factors))
        by_gate = order.cut(made.view(-1, 3, width))
        _with_last(dhs, dh_last, order)
        first = torch.zeros_like(dh_last)
        for t in order.back:
            dh = dhs[t]
            torch.mul(by_state[t], dh.unsqueeze(1), out=by_gate[t])
            dy[t].copy_(dz[t])
            of_read[t].mul_(reset[t])
            q = product.round(dy[t])
            for rows, before in order.passed(dhs, t, first):
                product.add_to(before, q[rows])
                before.addcmul_(dh[rows], kept[t][rows])
        return made, of_product, (first,)

    def expected(self, gates: Single, weight: Single, start: Single, steps: int) -> Expected:
        def step(z: Single, h: Single) -> tuple[Single, ...]:
            z = quadrature(gates, h * weight)
            return z, quadrature(sigmoid_rms(z) * tanh_rms(z), sigmoid_rms(z) * h)

        _, h = _settled(step, steps, gates, start)
        return Expected(h, ONE * 0)


class _Tanh(Kind):
    """Runs h = tanh(z + W h) (Elman 1990)."""

    def run(
        self, z: Tensor, order: Order, product: Product, start: State, q: Tensor, hs: Tensor
    ) -> Tensor | None:
        gates, states, q0 = order.cut(z), order.cut(hs), q
        for t in order.steps:
            product.add_to(gates[t], _fitted(q, q0, order.sizes[t]))
            q = product.round(torch.tanh(gates[t], out=states[t]))
        return None

    def factors(self, z: Tensor, y: Tensor, earlier: Tensor, after: Tensor) -> Factors:
        return (1 - after.square(),)

    def back(
        self, factors: Factors, order: Order, product: Product, grad: Tensor, last: State
    ) -> tuple[Tensor, Tensor, State]:
        (dh_last,) = last
        dhs, by_state = (order.cut(x) for x in (grad, *factors))
        _with_last(dhs, dh_last, order)
        first = torch.zeros_like(dh_last)
        for t in order.back:
            q = product.round(dhs[t].mul_(by_state[t]))
            for rows, dh in order.passed(dhs, t, first):
                product.add_to(dh, q[rows])
        return grad, grad, (first,)

    def expected(self, gates: Single, weight: Single, start: Single, steps: int) -> Expected:
        def step(z: Single, h: Single) -> tuple[Single, ...]:
            z = quadrature(gates, h * weight)
            return z, tanh_rms(z)

        _, h = _settled(step, steps, gates, start)
        return Expected(h, ONE * 0)


#: torch's name -> the kind of layer.
KINDS: dict[str, Kind] = {"lstm": _Lstm(), "gru": _Gru(), "rnn_tanh": _Tanh()}
