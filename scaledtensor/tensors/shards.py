"""Parts of a tensor on several ranks, as `fully_shard` and tensor parallelism make them.

Such a parameter is a `DTensor` whose local tensor is a ScaledTensor. Each rank computes statistics
of its part, and the functions here combine them.
"""

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import DTypeError
from scaledtensor.scales.measure import amax
from scaledtensor.tensors.tensor import ScaledTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: torch has the first name from 2.13 on.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))

__all__ = [
    "Groups",
    "by_groups",
    "groups_of",
    "is_dtensor",
    "is_dtensor_class",
    "is_sharded",
    "of_all_parts",
    "part_of",
    "ranks_of",
    "squares_and_amax",
]

#: The groups of ranks that hold parts, one for each dimension of the mesh that the tensor is cut
#: along.
Groups = tuple[Any, ...]


def is_dtensor(x: Any) -> "TypeGuard[DTensor]":
    """Whether `x` is a DTensor. No tensor is one before torch's module of DTensors is imported.
    That import takes a third as long as torch's, and a program of one process does not need it."""
    return is_dtensor_class(type(x))


def is_dtensor_class(kind: type) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    own = getattr(module, "DTensor", None)  # None, too, while that module is being imported
    return own is not None and issubclass(kind, own)


def is_sharded(x: Any) -> "TypeGuard[DTensor]":
    """Whether `x` is a DTensor of a ScaledTensor: each rank holds a part, or the whole."""
    return is_dtensor(x) and isinstance(_torch.local_part(x), ScaledTensor)


def part_of(x: Any) -> ScaledTensor:
    """This rank's ScaledTensor of `x`: `x` itself, or the part of a DTensor."""
    part: Any = _torch.local_part(x) if is_dtensor(x) else x
    if not isinstance(part, ScaledTensor):
        raise DTypeError(f"this takes a ScaledTensor, or a DTensor of one; got {type(x).__name__}")
    return part


def groups_of(x: Any) -> Groups:
    """The groups over which `x` is cut into parts; empty if this rank holds the whole."""
    if not is_dtensor(x):
        return ()
    mesh = x.device_mesh
    return tuple(
        mesh.get_group(dim) for dim, cut in enumerate(x.placements) if not cut.is_replicate()
    )


def ranks_of(x: Any) -> Groups:
    """The groups of all ranks that work with `x`, with the ranks that hold the same part."""
    mesh = x.device_mesh
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))


def of_all_parts(numbers: Tensor, groups: Groups) -> Tensor:
    """The `numbers` of the ranks of all parts, of shape (parts, *numbers.shape). Each group takes
    one collective. The result and its order are the same on every rank."""
    found = numbers.unsqueeze(0)
    for group in groups:
        every = found.new_empty(dist.get_world_size(group) * found.shape[0], *numbers.shape)
        _ALL_GATHER(every, found.contiguous(), group=group)
        found = every
    return found


def by_groups(
    tensors: Iterable[Any], of: Callable[[Any], Groups] = groups_of
) -> dict[Groups, list[Any]]:
    """Collect tensors by the groups that they are cut over, or by the groups that `of` returns."""
    found: dict[Groups, list[Any]] = {}
    for x in tensors:
        found.setdefault(of(x), []).append(x)
    return found


def squares_and_amax(part: ScaledTensor) -> Tensor:
    """The sum of squares and the largest magnitude of a part's finite values, as two float64
    numbers."""
    value = part.qdata.detach().double() * part.scale.double()
    value = torch.where(value.isfinite(), value, 0.0)
    return torch.stack([value.square().sum(), amax(value)])
