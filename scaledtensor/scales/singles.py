"""Scales and expected RMS as numbers of the host.

An operator on 0-dim tensors takes as long as one on the elements of a small layer, and a rule would
call a dozen of them. So outside tracing, `scale_of` and `rms_of` give a rule `Single`s: Python
numbers with the arithmetic of float32, which take a tenth of the time. In traced code they give the
closed forms of `forms.py`, and tensors of the meta device have no numbers.

The result of such a rule keeps its numbers in a `Cell`, which views share. When `x.scale` is first
read, the cell makes a tensor. From then on this tensor holds the value, and may be written to.

On a CPU a number is read from this tensor at once. Another device takes a wait, so there the cell
remembers the number until somebody may have written to the tensor: until `x.scale` is read again,
or until torch counts a write. Compiled code writes uncounted, and asks for `x.scale` before each
run. A rule that measures, such as a norm's backward pass, waits for the number. Otherwise each of
the operators after it would launch a dozen kernels for its scales.
"""

import math
import typing
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of, is_readable
from scaledtensor.native import elements
from scaledtensor.scales.forms import Form, program, written
from scaledtensor.scales.numbers import ONE, Single, exponential, quotient, rounded

F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "CELLS",
    "ONE",
    "UNCOUNTED",
    "Amount",
    "Cell",
    "Single",
    "amount",
    "amounts_of",
    "asked",
    "asked_for",
    "calculates",
    "cells",
    "copied",
    "counted_base",
    "exponential",
    "held_anew",
    "hold",
    "is_known",
    "multiplied",
    "multiplier",
    "pair_of",
    "put",
    "quotient",
    "remembered",
    "rms_of",
    "rounded",
    "scale_of",
    "scaled_by",
    "shared",
    "single_of",
    "tensor_of",
    "view_of",
]


Amount: TypeAlias = Tensor | Single | Form
"""A scale or an RMS: a 0-dim float32 tensor, the same number as a Single, or in traced code its
closed form."""


# --- cells, which tensors and their views share -------------------------------------------------


#: The version of a tensor whose number is not known.
_UNKNOWN = -1


def _version_of(x: Tensor) -> int:
    """The number of writes into `x`. torch counts none in tensors of inference mode."""
    return 0 if x.is_inference() else x._version


class Cell:
    """A number that a tensor and its views share, and its 0-dim tensor, once one was made."""

    __slots__ = ("made", "number", "pair", "place", "version")

    def __init__(self, number: Single | Form, pair: Tensor | None = None, place: int = 0) -> None:
        self.made: Tensor | None = None
        self.number = number
        self.pair, self.place = pair, place
        self.version = _UNKNOWN
        if type(number) is Form and pair is None:
            # A graph may return any tensor, and nothing can be added to it by then. So the node is
            # made now; the compiler drops it if nothing reads it.
            self.made = number.fresh()

    @classmethod
    def around(cls, made: Tensor) -> "Cell":
        """A cell for the number in a tensor of a device that is not the host."""
        cell = cls(ONE)
        cell.made = made
        return cell

    def read(self, made: Tensor) -> Any:
        """The number in `made`, the tensor of this cell; `made` itself if it cannot be read now."""
        if backend_of(made).host or type(made) is not Tensor or torch.compiler.is_compiling():
            return single_of(made)
        version = _version_of(made)
        if version != self.version:
            found = single_of(made)
            if not isinstance(found, Single):
                return found
            self.number, self.version = found, version
        return self.number

    def write(self, number: Single, x: Any) -> None:
        """Write a number into the cell of the tensor `x`."""
        if self.made is None:
            self.number = number
            return
        _fill(self.made, number, x)
        if not backend_of(self.made).host:
            self.number = number
            self.version = _version_of(self.made)

    def tensor(self, inference: bool, device: torch.device | str = "cpu") -> Tensor:
        """The tensor that holds the value from now on. The tensor of a number of the host is a real
        one, also during tracing. Whoever takes it may write to it."""
        if self.made is None and self.pair is not None:
            self.made = self.pair.select(0, self.place)
        elif self.made is None:
            with _torch.outside_modes(), torch.inference_mode(inference):
                number: Any = self.number
                self.made = torch.scalar_tensor(number, dtype=torch.float32, device=device)
        self.version = _UNKNOWN
        return self.made


# --- reading the Amounts of a tensor ------------------------------------------------------------


def is_known(x: Any) -> bool:
    """Whether the host may read the numbers of `x` now: `x` is a real tensor, outside tracing."""
    return type(x) is Tensor and not torch.compiler.is_compiling() and is_readable(x)


def single_of(x: Amount) -> Any:
    """The number in a 0-dim float32 tensor if it can be read; otherwise `x` itself. Reading it
    waits for a device that is not the host."""
    return Single(x.item()) if is_known(x) and not x.dim() else x  # type: ignore[union-attr]


def amount(x: Tensor) -> Any:
    """A 0-dim float32 tensor as the Amount that rules calculate with."""
    return Form.of(x) if torch.compiler.is_compiling() else single_of(x)


def scale_of(x: Any) -> Any:
    """The scale of a ScaledTensor, as the Amount that rules calculate with."""
    return _read(x, "scale", "_scale")


def rms_of(x: Any) -> Any:
    """The expected RMS of a ScaledTensor, as the Amount that rules calculate with."""
    return _read(x, "rms", "_rms")


def amounts_of(x: Any) -> tuple[Any, Any]:
    """(scale_of(x), rms_of(x)), faster, for rules that run hundreds of times in a step."""
    if torch.compiler.is_compiling():
        return _form_of(x, "scale", "_scale"), _form_of(x, "rms", "_rms")
    held = x.__dict__
    return _held(held, "scale", "_scale"), _held(held, "rms", "_rms")


def _read(x: Any, name: str, numbered: str) -> Any:
    if torch.compiler.is_compiling():
        return _form_of(x, name, numbered)
    return _held(x.__dict__, name, numbered)


def _held(held: dict[str, Any], name: str, numbered: str) -> Any:
    if name in held:
        return single_of(held[name])
    cell = held[numbered]
    return cell.number if cell.made is None else cell.read(cell.made)


def _form_of(x: Any, name: str, numbered: str) -> Form:
    cell = x.__dict__.get(numbered)
    known = None if cell is None else cell.number
    if not isinstance(known, Form):
        return Form.of(getattr(x, name))
    if known.counts:
        return known
    found = Form.of(getattr(x, name))
    found.wild, found.compounds = known.wild, known.compounds
    return found


def remembered(function: F) -> F:
    """A function of an Amount and of numbers, with a cache for Amounts that are numbers. Eager code
    without an optimizer calls it with the same numbers again and again."""
    known = lru_cache(maxsize=1 << 10)(function)

    @wraps(function)
    def found(amount: Any, *numbers: float) -> Any:
        return (known if type(amount) is Single else function)(amount, *numbers)

    return typing.cast(F, found)


def tensor_of(x: Amount, device: torch.device | None = None) -> Tensor:
    """An Amount as a 0-dim tensor, which the caller only reads. A number becomes a tensor of the
    host, or of `device` if it is given, for kernels that read the number on their device."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Form) or device is None or backend_of(device).host:
        return x.tensor()
    place = (float(x), device)
    found = _ON_DEVICES.get(place)
    if found is None:
        found = Cell(x).tensor(False, device)
        if abs(math.frexp(x)[0]) == 0.5:
            _ON_DEVICES[place] = found
    return found


# --- giving a tensor its Amounts ----------------------------------------------------------------


def hold(x: Any, scale: "Amount | Cell", rms: "Amount | Cell") -> None:
    """Give a new ScaledTensor its scale and RMS."""
    if type(scale) is type(rms) is Single:
        x._scale, x._rms = Cell(scale), Cell(rms)
        return
    if type(scale) is type(rms) is Form and not torch.compiler.is_exporting():
        scale, rms = cells(torch.ops.scaledtensor.pair(*program(scale, rms)), scale, rms)
    elif type(scale) is Cell or type(rms) is Cell:
        _part(scale, rms)
    for name, numbered, amount in (("scale", "_scale", scale), ("rms", "_rms", rms)):
        if isinstance(amount, Tensor) and not _is_distant(amount):
            setattr(x, name, amount)
            continue
        cell = amount if isinstance(amount, Cell) else _cell_of(amount)
        setattr(x, numbered, cell)
        if cell.made is not None and not _is_distant(cell.made):
            setattr(x, name, cell.made)


def _is_distant(x: Tensor) -> bool:
    """Whether `x` has elements that the host cannot read without a wait."""
    if type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    backend = backend_of(x)
    return backend.has_elements and not backend.host


def _cell_of(amount: Any) -> Cell:
    return Cell.around(amount) if isinstance(amount, Tensor) else Cell(amount)


def held_anew(x: Any) -> None:
    """Remember the numbers of a tensor whose attributes `scale` and `rms` were assigned."""
    held = x.__dict__
    if _is_distant(held["scale"]):
        hold(x, held.pop("scale"), held.pop("rms"))


def _part(scale: Any, rms: Any) -> None:
    """Give a scale and an RMS that are not the elements of one tensor a tensor each: a graph takes
    every tensor apart, and nothing can be added to it by then."""
    if type(scale) is type(rms) is Cell and scale.pair is rms.pair:
        return
    for cell in (scale, rms):
        if type(cell) is Cell and cell.pair is not None:
            cell.tensor(False)


def cells(pair: Tensor, scale: Form | None = None, rms: Form | None = None) -> tuple[Cell, Cell]:
    """Cells for a scale and an RMS that are the elements of a tensor."""
    of_scale, of_rms = (
        Cell(Form.element(pair, n) if number is None else number, pair, n)
        for n, number in enumerate((scale, rms))
    )
    return of_scale, of_rms


def pair_of(x: Any) -> Tensor | None:
    """The tensor of two elements that holds scale and RMS of a traced tensor, or None if each has a
    tensor of its own."""
    held = x.__dict__
    found = []
    for name in ("scale", "rms"):
        cell = held.get(f"_{name}")
        # A tensor that became another one has tensors for both in its place.
        if cell is None or (name in held and held[name] is not cell.made):
            return None
        found.append(cell.pair)
    return found[0] if found[0] is found[1] else None


#: The attributes that hold the cells.
CELLS = ("_scale", "_rms")


class Asked:
    """An attribute that is a number until it is first read, and a tensor from then on. The tensor
    is put into the object's `__dict__`, where Python finds it before this descriptor.

    `__getattr__` would do the same, but Dynamo reads no attribute of a tensor class that has one.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.cell = name, f"_{name}"

    @_torch.inlined_only
    def __get__(self, x: Any, owner: type) -> Any:
        if x is None:
            return self
        cell = x.__dict__.get(self.cell)
        if cell is None:
            raise AttributeError(f"{type(x).__name__!r} object has no attribute {self.name!r}")
        device = x.__dict__["qdata"].device
        made = cell.tensor(x.is_inference(), device)
        if not _is_distant(made):
            x.__dict__[self.name] = made
        return made


def asked_for(x: Any, name: str) -> Tensor | None:
    """The tensor of the "scale" or "rms" of `x`, or None if nobody has read it yet."""
    held = x.__dict__
    if name in held:
        made: Tensor = held[name]
        return made
    return held[f"_{name}"].made  # type: ignore[no-any-return]


def asked() -> Any:
    """`Asked`, for an attribute that is declared as a Tensor."""
    return Asked()


def shared(x: Any, name: str) -> Tensor | Cell:
    """The "scale" or "rms" of `x` for a view of it: the same object."""
    held = x.__dict__
    cell: Cell | None = held.get(f"_{name}")
    if cell is not None and (name not in held or isinstance(cell.number, Form)):
        return cell
    return held[name]  # type: ignore[no-any-return]


#: The attributes that a view takes from its tensor.
_SHARED = ("scale", "_scale", "rms", "_rms", "format", "recipe", "nonnegative", "site")


def view_of(x: Any, qdata: Tensor, made: Any) -> Any:
    """Make the new wrapper `made` a view of `x` around `qdata`. Eager code makes hundreds of them
    in a step."""
    held, new = x.__dict__, made.__dict__
    new["qdata"] = qdata
    for name in _SHARED:
        if name in held:
            new[name] = held[name]
    return made


#: (power of two, device) -> its tensor there.
_ON_DEVICES: dict[tuple[float, torch.device], Tensor] = {}


# --- calculating with Amounts -------------------------------------------------------------------

_FACTORS: dict[float, Tensor] = {}


def multiplier(x: Amount) -> Tensor | Single:
    """The factor to multiply a tensor by. A power of two becomes a 0-dim tensor from a cache, which
    takes a third of the time of the number. The caller must not write to it."""
    if not isinstance(x, Single):
        return tensor_of(x)
    found = _FACTORS.get(x)
    if found is None:
        if abs(math.frexp(x)[0]) != 0.5:
            return x
        found = _FACTORS[x] = Cell(x).tensor(False)
    return found


def scaled_by(q: Tensor, x: Amount, dtype: torch.dtype | None = None) -> Tensor:
    """Elements times an Amount, which is one node of a traced graph. `dtype` is the dtype of the
    result, of at least 16 bits; None stands for the dtype that torch gives it."""
    if isinstance(x, Form) and q.dim() and q.is_floating_point() and not _torch.is_transforming():
        return x.times(q, dtype)
    if type(x) is Single and (q.dtype is torch.bfloat16 or dtype is torch.bfloat16):
        made = elements.scaled(q, x, dtype or q.dtype)
        if made is not None:
            return made
    return multiplied(q, multiplier(x), dtype)


def scaled_in_place(q: Tensor, x: Amount) -> Tensor:
    """`q` itself, times an Amount. The caller made `q`, and nobody else holds its elements."""
    if type(x) is Single and elements.scale(q, x):
        return q
    return q.mul_(multiplier(x))


def multiplied(q: Tensor, number: Tensor | Single, dtype: torch.dtype | None = None) -> Tensor:
    """Elements times a number, in `dtype`. The product is in the wider of the two dtypes."""
    if dtype is None or dtype == q.dtype:
        return q * number
    return (q.to(torch.promote_types(q.dtype, dtype)) * number).to(dtype)


def calculates(x: Any) -> bool:
    """Whether `scale_of` and `rms_of` give numbers for this ScaledTensor."""
    return isinstance(scale_of(x), Single)


def copied(x: Amount) -> Any:
    """A copy of an Amount for another tensor. Numbers never change, so they are not copied."""
    return x.clone() if isinstance(x, Tensor) else x


def put(x: Any, scale: Amount | None = None, rms: Amount | None = None) -> None:
    """Write a scale and an RMS into a ScaledTensor and into its views. None keeps the old one."""
    # Both tensors are made before either is written, since one may follow from the other.
    scale = tensor_of(scale) if isinstance(scale, Form) else scale
    rms = tensor_of(rms) if isinstance(rms, Form) else rms
    if scale is not None:
        _put(x, "scale", "_scale", scale)
    if rms is not None:
        _put(x, "rms", "_rms", rms)


def _put(x: Any, name: str, numbered: str, number: Tensor | Single) -> None:
    held = x.__dict__.get(name)
    if isinstance(number, Tensor):
        written()
        _fill(getattr(x, name), number, x)
    elif held is None:
        x.__dict__[numbered].write(number, x)
    else:
        _fill(held, number, x)


#: The attribute of the tensor `x.data`. PyTorch does not count writes through it.
UNCOUNTED = "_uncounted"


def counted_base(x: Any) -> Any:
    """Return the tensor whose inner tensors count a write into `x`: `x` itself, or the base of this
    view. None if the write is not counted.

    Compiled code saves inner tensors. torch counts a write for `x` itself, which such code does not
    look at, and its backward pass would read new elements and new numbers in silence.
    """
    if torch.compiler.is_compiling():
        return None  # a compiled graph counts its own writes
    base = x._base if x._is_view() else x
    return None if UNCOUNTED in vars(base) else base


def _fill(made: Tensor, number: Tensor | Single, x: Any) -> None:
    """Write a number into the 0-dim tensor that holds it for `x`, unless it is there already."""
    known = type(number) is Single and is_known(made) and backend_of(made).host
    if known and made.item() == number:
        return
    before = _version_of(made)
    made.copy_(number) if isinstance(number, Tensor) else made.fill_(number)
    # Inside an operator, torch counts no write into an inner tensor.
    if _version_of(made) == before and not made.is_inference() and counted_base(x) is not None:
        torch.autograd.graph.increment_version(made)
