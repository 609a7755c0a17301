"""`unit_scaling.functional`: the functions of `scaledtensor.functional`, which have its names."""

from collections.abc import Callable
from typing import Any

import scaledtensor.functional as _functional
from scaledtensor.functional import *  # noqa: F403 - the same names, kept in one place
from scaledtensor.functional.spellings import COUNTERPARTS as _COUNTERPARTS

#: Function of torch -> the unit-scaled function, for every spelling that `unit_scale` knows.
torch_map: dict[Callable[..., Any], Callable[..., Any]] = _COUNTERPARTS

__all__ = [*_functional.__all__, "torch_map"]
