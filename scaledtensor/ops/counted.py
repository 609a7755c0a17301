"""Casts of compiled code, which are counted and not corrected.

A graph is made for the shifts of its weights, and the rules run while it is traced. So the graph
has an operator that counts, while the site of a weight looks, how many elements of an input are the
largest value of their format after the cast. A warning names the first weight for which these are
more than 1%.

The operator knows a weight by the address of its RMS, which is an input of the graph. Any other
mark would be among the guards of the graph, and each layer would be compiled for itself. The
product takes its scale from the operator: a compiler would drop an operator without a result.
"""

import typing
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scaledtensor import _torch, verbs
from scaledtensor.formats import Format
from scaledtensor.formats import get as get_format
from scaledtensor.ops.algebra import elements
from scaledtensor.ops.products import product_dtype
from scaledtensor.ops.registry import rule
from scaledtensor.ops.sites import LOST_FOR_GOOD, Site, share, tell
from scaledtensor.recipes import Recipe, Unit
from scaledtensor.tensor import ScaledTensor

__all__ = ["begin", "watched"]

#: The modules whose weights may be met. (A weak reference to a weight itself would keep torch from
#: swapping it.)
_owners: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_addresses: dict[int, Site | None] = {}


def begin(module: nn.Module) -> None:
    """Compiled code finds the sites of the weights of `module` from now on, but not those of its
    children's weights."""
    if any(isinstance(p, ScaledTensor) for p in module.parameters(recurse=False)):
        _owners.add(module)
        _addresses.clear()


def watched(cast: list[Any], operands: Sequence[Any], recipe: Recipe) -> list[Any]:
    """The operands of a product as they were cast: the input, the weight and any others. Code that
    is being compiled is to count the input when it runs."""
    counts = (
        torch.compiler.is_compiling()
        and not torch.compiler.is_exporting()
        and not _torch.is_transforming()
        and isinstance(recipe, Unit)
        and recipe.guard
        and len(cast) > 1
        and all(isinstance(x, ScaledTensor) for x in (cast[0], operands[1]))
        and cast[0].format.bits == 8
    )
    return [verbs.counted(cast[0], operands[1].detach()), *cast[1:]] if counts else cast


@rule(verbs.counted)
def _counted(x: ScaledTensor, weight: ScaledTensor) -> ScaledTensor:
    """The identity."""
    scale = torch.ops.scaledtensor.count(x.scale, _as_read(x, weight), weight.rms, x.format.name)
    made = x.like(x.qdata, scale, x.rms)
    made.decoded, made.passing = x.decoded, x.passing
    return made


def _as_read(x: ScaledTensor, weight: ScaledTensor) -> Tensor:
    """The elements as the product reads them. Elements in another form would be written to memory
    for the operator alone."""
    if not x.qdata.is_cpu:
        return x.qdata
    rows = x.flatten(0, -2) if weight.dim() == 2 and x.dim() > 2 else x
    return elements(typing.cast(ScaledTensor, rows)).to(product_dtype(x.device))


_LIBRARY = torch.library.Library("scaledtensor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "count(Tensor scale, Tensor q, Tensor weight_rms, str format) -> Tensor"
)


def _count(scale: Tensor, q: Tensor, weight_rms: Tensor, format: str) -> Tensor:
    site = _site_at(weight_rms.data_ptr())
    if site is not None and site.is_due() and not _is_captured(q):
        _tell(site, q, get_format(format))
    return scale.clone()


_LIBRARY.impl("count", _count, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("scaledtensor::count", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _count_fake(scale: Tensor, q: Tensor, weight_rms: Tensor, format: str) -> Tensor:
    return torch.empty_like(scale)


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing may be read."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _site_at(address: int) -> Site | None:
    """The site of the weight whose RMS is there. None for what is no weight."""
    if address not in _addresses:
        if len(_addresses) > _MANY:
            _addresses.clear()
        _addresses[address] = None
        for module in list(_owners):
            for p in module.parameters(recurse=False):
                if isinstance(p, ScaledTensor) and p.site is not None:
                    _addresses[p.rms.data_ptr()] = p.site
    return _addresses[address]


#: Addresses of products between activations come and go.
_MANY = 1 << 12


def _tell(site: Site, q: Tensor, fmt: Format) -> None:
    lost = share(q.float().abs() == fmt.max) if q.numel() else 0.0
    if lost > LOST_FOR_GOOD:
        tell(
            "saturated",
            f"{lost:.1%} of the inputs of {site.name} become {fmt.name}'s largest value in compiled"
            " code, which corrects no cast: the terms that they are sums of are correlated, which "
            "the rules do not know. Correct the casts before the model is compiled, by "
            "scaledtensor.calibrate(model, batches)",
        )
