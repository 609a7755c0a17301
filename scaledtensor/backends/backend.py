"""The facts about a kind of device on which this library depends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Backend", "Choice", "Codes", "Sharing", "Units"]


class Choice(NamedTuple):
    """The dtype in which a device computes emulated products, and the reason."""

    dtype: torch.dtype
    """torch.bfloat16 or torch.float32."""
    reason: str


class Sharing(NamedTuple):
    """How the operand of a product is cast, as FP8 units see it."""

    block: tuple[int, int]
    """Elements that share a scale, (across, along) the summed dimension, as in `recipes.casts`."""
    elements: torch.dtype
    """The dtype of the codes."""
    scales: torch.dtype
    """float32; float8_e8m0fnu (MX); or float8_e4m3fn under a second level (NVFP4)."""
    words: str
    """The spelling of the cast, for messages."""


class Codes(NamedTuple):
    """The operand of a product: codes, their scales, and how they share scales."""

    codes: Tensor
    scale: Tensor
    sharing: Sharing


class Units(Protocol):
    """The FP8 units of a device.

    An obstacle is the reason why the units do not take a product, or None if they take it. A
    product that has an obstacle is emulated: the same values are multiplied in bfloat16 or float32.
    `fast` allows the units to add in fewer bits. All products are in bfloat16.
    """

    def obstacle(self, left: Codes, right: Codes) -> str | None:
        """Return the obstacle of the product of two operands."""

    def obstacle_of_casts(self, left: Sharing, right: Sharing) -> str | None:
        """Return the obstacle of a product of operands of any size."""

    def obstacle_of_codes(self, a: Tensor, b: Tensor) -> str | None:
        """Return the obstacle of a product of codes with one scale for each tensor."""

    def obstacle_of_groups(self, a: Tensor, b: Tensor) -> str | None:
        """Return the obstacle of `groups`."""

    def multiply(self, left: Codes, right: Codes, ratio: Tensor, fast: bool) -> Tensor:
        """Return the product of the values of two operands, times `ratio`."""

    def scaled(self, a: Tensor, b: Tensor, scale: Tensor | None, fast: bool) -> Tensor:
        """Return `(a @ b) * scale`, rounded once; None stands for 1."""

    def groups(self, a: Tensor, b: Tensor, offs: Tensor, scale: Tensor, fast: bool) -> Tensor:
        """Return `scale` times the product of each group of rows, (M, K), and its matrix of
        (groups, K, N). Each operand has one scale for the tensor."""


def _unknown(device: torch.device) -> Choice:
    return Choice(torch.bfloat16, f"what {device.type} devices multiply is not asked")


@dataclass(frozen=True)
class Backend:
    """One kind of device. The defaults hold for an unknown kind."""

    name: str
    """The kind, `torch.device.type`."""

    # --- memory ---

    host: bool = False
    """The elements are memory of this process. A number is then read without waiting, large tensors
    are taken in pieces that stay in the cache, and the loops of `scaledtensor.native` run."""
    has_elements: bool = True
    """Tensors have elements to read."""
    own_generator: bool = False
    """Each device has a random generator, which `torch.random.fork_rng` restores."""
    is_capturing: Callable[[], bool] = lambda: False
    """Whether a graph of kernels is being recorded, in which nothing may be read."""
    collectives: str = "gloo"
    """The backend of `torch.distributed` between processes that have one device each."""

    # --- kernels ---

    lacks_bfloat16: frozenset[str] = frozenset()
    """ATen operators without a kernel for bfloat16, like their backward operators."""
    float32_attention: bool = False
    """Attention of bfloat16 operands is computed in float32."""
    mixed_norms: bool = False
    """The kernels of layer norm and group norm take 16-bit data beside a float32 weight, and then
    keep float32 statistics. CUDA's kernels take one dtype."""
    fused_rms_norm: bool = True
    """torch has a kernel for the RMS norm; otherwise it composes the norm of other operators."""
    flash: Callable[[torch.device], str | None] = lambda device: None
    """The ATen operator of the flash attention that `torch` takes for bfloat16 or float32."""

    # --- products ---

    products: Callable[[torch.device], Choice] = _unknown
    """The dtype in which a device computes emulated products."""
    units: Callable[[torch.device], Units | None] | None = None
    """The FP8 units of a device. None, and a result of None, stand for a device without them."""

    # --- code that Inductor writes ---

    writes_cpp: bool = False
    """Inductor writes C++ in place of Triton: loops have to be kept apart to be vectorised, and
    codes that are decoded in the kernel that makes them are never written to memory."""
    compiled_casts: tuple[torch.dtype, ...] = (torch.float8_e8m0fnu,)
    """Dtypes that compiled code reaches by a cast of torch, because Inductor has no integers of
    their bits, or no vectors of such integers."""

    # --- the report of `scaledtensor.hardware` ---

    devices: Callable[[], Sequence[torch.device]] = lambda: ()
    """The devices of this machine."""
    describe: Callable[[torch.device], str] = str
    """The name of a device."""
