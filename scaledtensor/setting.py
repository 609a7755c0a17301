"""Settings of the process that are also context managers.

`on_missing("error")` sets a value from that call on. `with on_missing("error"):` restores the
earlier value when the block ends.
"""

from typing import Any, Self

__all__ = ["Setting"]


class Setting:
    """A setting. Its constructor sets the value. A subclass declares the first value as `_now`."""

    _now: Any

    def __init__(self, value: Any) -> None:
        self._before = self._now
        type(self)._now = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        type(self)._now = self._before
