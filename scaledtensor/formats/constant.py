"""Records that are constants to torch.compile, and their integers with them.

`torch.utils._pytree.register_constant` makes Dynamo guard on the equality of records of a class.
From torch 2.15 on Dynamo makes symbols of their integers all the same, where a record is an
argument of the compiled function and two of them were seen, or under `dynamic=True`. Where the
width of a mantissa is a symbol, Inductor writes code that does not compile. These fields are held
as strings, because every version takes a string, and the integer that is parsed from it, for a
constant.
"""

from typing import Any

from torch.utils._pytree import register_constant

from scaledtensor.errors import FormatError

__all__ = ["make_constant"]


def make_constant(record: type, *integers: str) -> None:
    """Tell torch.compile that instances of a frozen dataclass are constants, and these fields of
    theirs, which are ints."""
    register_constant(record)
    for name in integers:
        setattr(record, name, _Integer(name))


class _Integer:
    """A field that is held as a string."""

    def __init__(self, name: str) -> None:
        self.name, self.held = name, f"_{name}"

    def __get__(self, record: Any, owner: type) -> Any:
        return self if record is None else int(getattr(record, self.held))

    def __set__(self, record: Any, given: Any) -> None:
        if type(given) is not int:
            raise FormatError(f"{self.name} of a format is an int, got {given!r}")
        object.__setattr__(record, self.held, str(given))
