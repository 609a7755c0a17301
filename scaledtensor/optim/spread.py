"""Parameters and states that are spread over ranks, for steps that are by element: each rank steps
its part, and what it keeps of it is a part of a DTensor laid out as the parameter is."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from scaledtensor import _torch
from scaledtensor.errors import ShapeError
from scaledtensor.shards import is_dtensor

__all__ = ["Parts", "as_spread", "check_alike", "part", "parts_of"]


def part(x: Any) -> Any:
    """What this rank has of a DTensor; anything else as it is."""
    return _torch.local_part(x) if is_dtensor(x) else x


def as_spread(x: Any, like: Tensor) -> Any:
    """A part, as the DTensor that it is one of, if `like` is one."""
    if not is_dtensor(like) or not isinstance(x, Tensor):
        return x
    mesh, cut = like.device_mesh, like.placements
    options: Any = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like).from_local(x, mesh, cut, **options)


def check_alike(name: str, x: Any, p: Tensor) -> None:
    """Raises ShapeError where a state is not laid out as its parameter is."""
    layouts = [(t.device_mesh, t.placements) if is_dtensor(t) else None for t in (x, p)]
    if layouts[0] != layouts[1]:
        raise ShapeError(
            f"state {name!r} of a parameter of shape {tuple(p.shape)} is {_told(x)}, and the "
            f"parameter is {_told(p)}: load it by scaledtensor.checkpoint, which cuts anew"
        )


def _told(x: Any) -> str:
    return f"spread over ranks as {x.placements}" if is_dtensor(x) else "whole"


class Parts:
    """The state of one parameter, as this rank's parts."""

    def __init__(self, state: dict[str, Any], parameter: Tensor) -> None:
        self.state, self.parameter = state, parameter

    def __contains__(self, name: str) -> bool:
        return name in self.state

    def __getitem__(self, name: str) -> Any:
        return part(self.state[name])

    def get(self, name: str) -> Any:
        return part(self.state.get(name))

    def put(self, name: str, x: Tensor) -> Any:
        """Keep a part; what is kept, whose part shares the memory of `x`."""
        self.state[name] = kept = as_spread(x, self.parameter)
        return part(kept)


def parts_of(states: Mapping[Tensor, dict[str, Any]], parameter: Tensor) -> Parts:
    """The state of `parameter`, empty where there is none yet."""
    return Parts(states[parameter], parameter)
