"""The numbers of a tensor: of its values, and of its gradient."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from scaledtensor import _torch
from scaledtensor.backends import backend_of
from scaledtensor.errors import UnsupportedError
from scaledtensor.formats import Format
from scaledtensor.ops.algebra import elements
from scaledtensor.scales.measure import amax, beyond, root_mean_square, underflowed
from scaledtensor.tensors.ruled import Ruled

__all__ = ["Data", "Metrics", "is_readable", "measure"]

FULL_NAMES = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "rms": "root mean square",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "abs_min_nonzero": "absolute minimum that is not zero",
    "numel": "number of elements",
    "saturated": "share beyond the largest value",
    "underflowed": "share lost to zero",
    "nans": "number of NaNs",
    "infs": "number of infinities",
}


@dataclass(frozen=True)
class Data:
    """The numbers of one tensor. Up to `abs_min_nonzero` they are over its finite elements, and
    zero if it has none."""

    mean_abs: float
    abs_mean: float
    std: float
    """Unbiased, same as `Tensor.std`; zero for a single element."""
    rms: float
    abs_max: float
    abs_min: float
    """The smallest magnitude; zero if any element is zero."""
    abs_min_nonzero: float
    numel: int
    saturated: float
    """Share of all elements that are finite and beyond the largest value of the format."""
    underflowed: float
    """Share of all elements that are not zero and that the format rounds to zero."""
    nans: int
    infs: int
    scale: float | None = None
    """The scale of a ScaledTensor; None for a plain tensor."""
    qdata: "Data | None" = None
    """The same numbers for the elements of a ScaledTensor, which are value / scale."""

    @property
    def held(self) -> "Data":
        """The numbers of the stored elements, to which the limits of a format apply: `qdata`, or
        this object for a plain tensor."""
        return self if self.qdata is None else self.qdata

    def to_dict(self) -> dict[str, Any]:
        """The numbers in built-in types. `scale` and `qdata` are left out if the tensor has
        none."""
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass
class Metrics:
    """The numbers of a tensor (`fwd`) and of its gradient (`bwd`), None until a backward pass."""

    fwd: Data
    bwd: Data | None = None

    @staticmethod
    def names() -> list[str]:
        """The names of the numbers of `Data`, which can be plotted, tabulated and compared."""
        return [f.name for f in fields(Data) if f.name in FULL_NAMES]

    @staticmethod
    def full_names() -> list[str]:
        return [FULL_NAMES[name] for name in Metrics.names()]

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """Raises KeyError for a name that `names()` does not have."""
        return FULL_NAMES[short_name]


def is_readable(x: Any) -> bool:
    """Whether `measure` takes `x`: a strided float tensor, plain or a ScaledTensor, with data.

    It does not take integers, complex tensors, sparse tensors, tensors on the meta device, tensors
    of other subclasses (FakeTensor, DTensor), or any tensor inside a transform of torch.func.
    """
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or _torch.is_transforming():
        return False
    if isinstance(x, Ruled):
        return is_readable(x.qdata) or x.qdata.dtype == torch.uint8
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or x.is_nested:
        return False
    packed = x.dtype == torch.float4_e2m1fn_x2
    return x.layout == torch.strided and backend_of(x).has_elements and not packed


def measure(x: Tensor, format: Format, scale: float | None = None) -> Data:
    """Return the numbers of `x`, in float64, with the shares that a cast to `format` would lose.

    It waits for the device of `x` once, or twice for a ScaledTensor. Autograd records nothing.

    Args:
        x: a tensor of any shape and float dtype, or a ScaledTensor.
        format: format of the cast.
        scale: scale of the cast. The numbers are then over value / scale, which this cast rounds.
            With None they are over the values, and for a ScaledTensor `qdata` has the numbers over
            its elements.

    Raises:
        UnsupportedError: `x` is no strided float tensor with data.
    """
    if not is_readable(x):
        kind = f"{x.dtype}, {x.layout}, on {x.device}" if isinstance(x, Tensor) else repr(x)
        raise UnsupportedError(f"measure() takes strided float tensors that hold data; got {kind}")
    with torch.no_grad(), _torch.disable_torch_function():
        if not isinstance(x, Ruled):
            return _numbers(x.detach(), format, 1.0 if scale is None else 1.0 / scale)
        plain = x.widened()
        q, own = elements(plain).detach(), float(plain.scale)
        if scale is not None:
            return _numbers(q, format, own / scale)
        return replace(_numbers(q, format, own), scale=own, qdata=_numbers(q, format))


def _numbers(x: Tensor, fmt: Format, factor: float = 1.0) -> Data:
    """The numbers over `x * factor`."""
    wide = (x if x.dtype.itemsize > 1 else x.float()).double().flatten() * factor
    finite = wide[wide.isfinite()]
    size = finite.abs()
    n = finite.numel()
    zero = wide.new_zeros(())
    nonzero = size[size > 0]
    found = torch.stack(  # so that the device is waited for once
        (
            size.mean() if n else zero,
            finite.mean().abs() if n else zero,
            finite.std() if n > 1 else zero,
            root_mean_square(size),
            amax(size),
            size.min() if n else zero,
            nonzero.min() if nonzero.numel() else zero,
            beyond(size, fmt),
            underflowed(size, fmt),
            wide.isnan().sum(),
            wide.isinf().sum(),
        )
    )
    mean_abs, abs_mean, std, rms, largest, smallest, tiniest, *counts = found.tolist()
    over, flushed, nans, infs = counts
    count = wide.numel()
    return Data(
        mean_abs=mean_abs,
        abs_mean=abs_mean,
        std=std,
        rms=rms,
        abs_max=largest,
        abs_min=smallest,
        abs_min_nonzero=tiniest,
        numel=count,
        saturated=over / max(count, 1),
        underflowed=flushed / max(count, 1),
        nans=int(nans),
        infs=int(infs),
    )
