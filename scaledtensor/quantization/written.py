"""Operators on a QuantizedTensor, written in operators that another library knows.

Exporters trace a model, and a QuantizedTensor computes each operator from its codes while they do.
`written_as` puts other computations in their place, such as the forms of ONNX
(`exchange/onnx_forms.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch

from scaledtensor.errors import UnsupportedError

__all__ = ["form_of", "refuse_onnx", "written_as"]

_forms: ContextVar[Mapping[Any, Callable[..., Any]]] = ContextVar(
    "forms", default=MappingProxyType({})
)


def form_of(operator: Any) -> Callable[..., Any] | None:
    """The computation that `written_as` puts in place of an operator, or None."""
    return _forms.get().get(operator)


@contextmanager
def written_as(forms: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """A context in which `forms` compute the operators that they have."""
    token = _forms.set(forms)
    try:
        yield
    finally:
        _forms.reset(token)


def refuse_onnx() -> None:
    """Raise an error inside `torch.onnx.export`, which has no translation of decoding by bits.

    Raises:
        UnsupportedError: `torch.onnx.export` is exporting, and no `written_as` is in force.
    """
    if torch.compiler.is_exporting() and not _forms.get() and torch.onnx.is_in_onnx_export():
        raise UnsupportedError(
            "torch.onnx.export does not translate the codes of quantised weights: "
            "scaledtensor.exchange.export_onnx(model, args, path) writes them as ONNX's own types"
        )
