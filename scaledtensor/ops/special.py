"""Special functions: gamma, Bessel, polynomials.

Those of one argument have a Gaussian integral by quadrature (`moments`). Those of two that are no
simple product have no closed form, and nobody trains through them: they are measured, and say so.
"""

import math
from typing import Any

import torch
from torch import Tensor

from scaledtensor.ops.algebra import at_value, measured, plain, value
from scaledtensor.ops.elementary import elementwise, spellings, with_slope
from scaledtensor.ops.moments import gaussian_rms, integrand
from scaledtensor.ops.operators import aten
from scaledtensor.ops.registry import Overload, Raw, rule
from scaledtensor.tensor import ScaledTensor

# --- gamma -----------------------------------------------------------------------------------

elementwise("lgamma", aten.lgamma.default)
elementwise("digamma", aten.digamma.default, heavy=True)

_POLYGAMMA = integrand("polygamma", lambda v, n: torch.polygamma(int(n), v), heavy=True)


@rule(aten.polygamma.default)
def polygamma(n: int, x: ScaledTensor) -> Raw:
    """median |polygamma(n, rx z)|: no second moment, by the poles at 0, -1, -2, .."""
    rms = gaussian_rms(_POLYGAMMA, x.rms, n, nonnegative=x.nonnegative)
    return at_value(lambda v: torch.polygamma(n, v.float()), x, rms)


@rule(aten.mvlgamma.default)
def mvlgamma(x: ScaledTensor, p: int) -> Raw:
    """Measured: log of a product of gamma functions, each over a domain of its own."""
    return measured(torch.mvlgamma(value(x).float(), p))


# --- normal distribution ---------------------------------------------------------------------

with_slope(
    "log_ndtr",
    aten.special_log_ndtr.default,
    function=torch.special.log_ndtr,
    slope=lambda x: (2 / math.pi) ** 0.5 / torch.special.erfcx(x * -(0.5**0.5)),
    words="sqrt(2 / pi) / erfcx(-x / sqrt(2))",
    caught=spellings("log_ndtr"),
)
with_slope(
    "ndtri",
    aten.special_ndtri.default,
    function=torch.special.ndtri,
    slope=lambda x: (2 * math.pi) ** 0.5 * torch.exp(torch.special.ndtri(x).square() / 2),
    words="sqrt(2 pi) exp(ndtri(x)^2 / 2)",
    heavy_slope=True,
    caught=spellings("ndtri"),
)


def _erfcx_slope(x: Tensor) -> Tensor:
    slope: Tensor = 2 * x * torch.special.erfcx(x) - 2 / math.pi**0.5
    return slope


with_slope(
    "erfcx",
    aten.special_erfcx.default,
    function=torch.special.erfcx,
    slope=_erfcx_slope,
    words="2 x erfcx(x) - 2 / sqrt(pi)",
    heavy=True,  # 2 exp(x^2) on the left
    heavy_slope=True,
    caught=spellings("erfcx"),
)
with_slope(
    "entr",
    aten.special_entr.default,
    function=torch.special.entr,
    slope=lambda x: -1 - x.log(),
    words="-1 - ln x",
    caught=spellings("entr"),
)

# --- Bessel and Airy -------------------------------------------------------------------------


def _i0e_slope(x: Tensor) -> Tensor:
    slope: Tensor = torch.special.i1e(x) - x.sign() * torch.special.i0e(x)
    return slope


with_slope(
    "i0e",
    aten.special_i0e.default,
    function=torch.special.i0e,
    slope=_i0e_slope,
    words="i1e(x) - sign(x) i0e(x)",
    caught=spellings("i0e"),
)
elementwise("i0", aten.i0.default)


def _i1_slope(x: Tensor) -> Tensor:
    near = x.abs() < 2.0**-10
    rest = torch.special.i1(x) / torch.where(near, 1.0, x)
    return torch.where(near, 0.5, torch.special.i0(x) - rest)


def _i1e_slope(x: Tensor) -> Tensor:
    near = x.abs() < 2.0**-10
    share = x.sign() + 1 / torch.where(near, 1.0, x)
    return torch.where(near, 0.5 - x.abs(), torch.special.i0e(x) - torch.special.i1e(x) * share)


with_slope(
    "i1",
    aten.special_i1.default,
    function=torch.special.i1,
    slope=_i1_slope,
    words="i0(x) - i1(x) / x",
    caught=spellings("i1"),
)
with_slope(
    "i1e",
    aten.special_i1e.default,
    function=torch.special.i1e,
    slope=_i1e_slope,
    words="i0e(x) - i1e(x) (sign(x) + 1 / x)",
    caught=spellings("i1e"),
)

for _name in (
    "airy_ai",
    "bessel_j0",
    "bessel_j1",
    "bessel_y0",
    "modified_bessel_i0",
    "modified_bessel_i1",
    "modified_bessel_k0",
    "scaled_modified_bessel_k0",
    "spherical_bessel_j0",
):
    elementwise(_name, getattr(aten, f"special_{_name}").default)
for _name in ("bessel_y1", "modified_bessel_k1", "scaled_modified_bessel_k1"):
    elementwise(_name, getattr(aten, f"special_{_name}").default, heavy=True)


# --- of two arguments ------------------------------------------------------------------------

_POLYNOMIALS = (
    "chebyshev_polynomial_t",
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "hermite_polynomial_h",
    "hermite_polynomial_he",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
    "shifted_chebyshev_polynomial_t",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
)


@rule(
    aten.igamma.default,
    aten.igammac.default,
    *(
        getattr(getattr(aten, f"special_{name}"), overload)
        for name in _POLYNOMIALS
        for overload in ("default", "x_scalar", "n_scalar")
    ),
    aten.special_zeta.default,
    aten.special_zeta.self_scalar,
    aten.special_zeta.other_scalar,
    pass_op=True,
)
def of_two(op: Overload, *args: Any) -> Raw:
    """Measured: incomplete gamma functions, Hurwitz's zeta, and polynomials whose degree is data
    have no closed second moment."""
    return measured(op(*(_wide(a) for a in args)))


def _wide(x: Any) -> Any:
    v = plain(x)
    return v.float() if isinstance(x, ScaledTensor) else v
