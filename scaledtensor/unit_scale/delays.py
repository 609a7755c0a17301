"""Delayed compensation: gradients that are at unit scale on their way back to where they began.

What a softmax lets pass of a gradient is small, so those of queries and keys come out of attention
at 0.03 to 0.2 if they are to be summed with that of the values. But as long as nothing is added to
such a gradient it may be larger by any power of two: from the attention back to the product that
made the query, whose weights' gradient then is at unit scale too, and whose input's gradient is
divided by that power again. The gradients that leave are the same.
"""

import math
from collections.abc import Iterator, Set
from typing import Any

from torch.nn.functional import scaled_dot_product_attention

from scaledtensor.functional.attention import attention_scales
from scaledtensor.scale import power_of_two_near
from scaledtensor.unit_scale.cuts import Cuts
from scaledtensor.unit_scale.plan import Step, Undo
from scaledtensor.unit_scale.record import PARAMETER, VARIABLE, Node, attention_options
from scaledtensor.unit_scale.residuals import is_shared

__all__ = ["delays"]


def delays(
    user: Node, step: Step, cuts: Cuts, borders: Set[Any]
) -> Iterator[tuple[Node, dict[str, Any]]]:
    """Of the queries and keys of an attention; none where their gradients, or those of what makes
    them, are of other uses too.

    Args:
        user: a call of `scaled_dot_product_attention` whose gradients share one scale.
        step: what becomes of it.
        cuts: of the run.
        borders: functions behind which a gradient is not followed.

    Returns:
        Calls, and what is added to their steps: where a gradient gets its factor, and where that is
        taken back.
    """
    if user.func is not scaled_dot_product_attention or len(user.args) < 3:
        return
    for position, factor in enumerate(_factors(user, step)):
        operand = user.args[position]
        if factor == 1 or not isinstance(operand, Node):
            continue
        inside = _inside(operand, user, cuts, borders)
        parameters = (n for node in inside for n in node.operands if n.kind == PARAMETER)
        if any(map(is_shared, parameters)):
            continue
        begins = [
            (node, _undo(node, 1 / factor, borders))
            for node in inside
            if node.func in borders or any(n not in inside for n in node.variables)
        ]
        if begins and all(undo is not None for _, undo in begins):
            yield user, {"delays": (((position, None), factor),)}
            yield from ((node, undo) for node, undo in begins if undo is not None)


def _factors(user: Node, step: Step) -> tuple[float, float]:
    """By what powers of two the gradients of query and key are too small."""
    query, key = user.args[:2]
    given = attention_options(user)
    d = query.shape[-1]
    scale = given.get("scale")
    out, dq, dk, _ = attention_scales(
        query.shape,
        key.shape,
        1 / d if scale is None else scale / math.sqrt(d),
        given.get("dropout_p", 0.0),
        step.causal,
        correlation=step.correlation or 0.0,
    )
    return power_of_two_near(dq / out), power_of_two_near(dk / out)


def _inside(operand: Node, user: Node, cuts: Cuts, borders: Set[Any]) -> dict[Node, None]:
    """The tensors that have no effect but by being this operand, back to the borders."""
    found: dict[Node, None] = {}
    if not cuts.is_only_used_by(operand, {user}) or user.operands.count(operand) != 1:
        return found
    found[operand] = None
    waiting = [operand]
    while waiting:
        node = waiting.pop()
        if node.func in borders:
            continue
        for source in node.variables:
            inside = source.kind == VARIABLE and source.func is not None and source not in found
            if inside and cuts.is_only_used_by(source, found.keys()):
                found[source] = None
                waiting.append(source)
    return _up_to_begins(operand, found, borders)


def _up_to_begins(operand: Node, found: dict[Node, None], borders: Set[Any]) -> dict[Node, None]:
    """Those of `found` that no call stands before at which the gradient gets its factor back: one
    that reads something else as well gives it back to all that it reads."""
    while True:
        reached = dict.fromkeys([operand])
        waiting = [operand]
        while waiting:
            node = waiting.pop()
            if node.func in borders or any(n not in found for n in node.variables):
                continue
            for source in node.variables:
                if source not in reached:
                    reached[source] = None
                    waiting.append(source)
        if len(reached) == len(found):
            return found
        found = reached


def _undo(node: Node, factor: float, borders: Set[Any]) -> dict[str, Any] | None:
    """The gradient of a border's one operand gets the factor, or that of the result. None where it
    would not reach what the model goes on with: the result of a call that writes into its argument,
    which a model need not look at."""
    if node.call is None:
        return None
    alone = len(node.variables) == 1 and bool(node.args) and node.args[0] is node.variables[0]
    if node.func in borders and alone:
        return {"delays": (((0, None), factor),)}
    if node.is_view and node.is_overwritten:
        return None  # the write is meant for what it is a view of, too
    return {"undo": (Undo(factor, node.output),)}
