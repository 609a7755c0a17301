"""Settings of the process that are context managers as well.

`on_missing("error")` holds from that call on; `with on_missing("error"):` restores the setting
before when the block ends.
"""

from typing import Any, Self

__all__ = ["Setting"]


class Setting:
    """Sets the value of its class when it is constructed. A subclass declares the first value."""

    _now: Any

    def __init__(self, value: Any) -> None:
        self._before = self._now
        type(self)._now = value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        type(self)._now = self._before
