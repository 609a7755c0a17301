"""Rounding with error feedback (GPTQ), and scales by least error."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import scaledtensor as sct
from scaledtensor import Dynamic, QuantizedTensor, Static, WeightOnly
from scaledtensor.errors import QuantizationError
from scaledtensor.formats import decode, encode, get
from scaledtensor.quantization.error_feedback import (
    DAMPING,
    factor_of,
    rounded_with_feedback,
)
from scaledtensor.quantization.observing import windows
from scaledtensor.recipes.casts import Amax, Cast, Microscale
from tests.assertions import assert_each
from tests.tensors import gaussian

#: Schemes of 4 bits, with every kind of scale and block.
SCHEMES = [
    ("nvfp4", None),
    ("mxfp4", None),
    ("int4", 32),
    ("int4", 128),
    ("int4", "channel"),
    ("int4", "tensor"),
    ("e2m1fn", 48),
    ("e2m1fn", (16, 16)),
    ("e3m2fn", (0, 32)),
]


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    """Inputs whose channels have common parts, as activations of networks have."""
    sources = gaussian(rows, width // 4, seed=seed)
    common = sources @ gaussian(width // 4, width, seed=99) / 4
    return common + gaussian(rows, width, seed=seed)


def layer(width: int = 192, out: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, out))


def error(model: nn.Module, plain: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        wanted = plain(x)
        return float((model(x) - wanted).norm() / wanted.norm())


def made(plain: nn.Module, config, data) -> nn.Module:
    calibration = data if config.needs_data else None
    return sct.quantize_(copy.deepcopy(plain), config, calibration=calibration)


def by_columns(w: Tensor, moments: Tensor, fmt, group: int, scale_of) -> tuple[Tensor, Tensor]:
    """GPTQ column by column in float64 (equations 2 and 3 of arXiv 2210.17323). Each column inverts
    the moments of the remaining columns, in place of a Cholesky factor."""
    w, k = w.double().clone(), w.shape[1]
    h = moments.double().clone()
    h += torch.eye(k, dtype=torch.float64) * DAMPING * h.diagonal().mean()
    codes, scales = torch.zeros(w.shape, dtype=fmt.storage_dtype), []
    for j in range(k):
        if j % group == 0:
            s = scale_of(w[:, j : j + group])
            scales.append(s)
        codes[:, j] = encode(w[:, j] / s, fmt, overflow="saturate_finite")
        inverse = torch.linalg.inv(h[j:, j:])
        left = (w[:, j] - decode(codes[:, j], fmt, torch.float64) * s) / inverse[0, 0]
        w[:, j:] -= left[:, None] * inverse[0]
    return codes, torch.stack(scales, 1)


def test__codes__equal_those_of_gptq_column_by_column():
    x = correlated(200, 140)
    w, moments = gaussian(4, 140), x.T @ x

    def amax(fmt):
        def found(part):
            exact = part.float().double().abs().amax(1) / fmt.max
            near = exact.float()
            short = near.double() < exact
            return torch.where(short, near.nextafter(torch.tensor(torch.inf)), near).double()

        return found

    def power(part):
        return 2.0 ** (part.float().double().abs().amax(1) / 6).log2().ceil()

    def check(case):
        cast, group, scale_of = case
        got = rounded_with_feedback(w, moments[None], cast)
        codes, scales = by_columns(w, moments, cast.format, group, scale_of)
        held = got.scale
        if held.dtype == torch.float8_e8m0fnu:
            held = decode(held, "e8m0fnu")
        torch.testing.assert_close(held.double(), scales, rtol=1e-6, atol=0)
        assert (got.codes.view(torch.uint8) != codes.view(torch.uint8)).double().mean() < 0.002

    int4, e2m1 = get("int4"), get("e2m1fn")
    cases = [
        (Cast(int4, Amax(), (1, 0)), 140, amax(int4)),
        (Cast(int4, Amax(), (1, 32)), 32, amax(int4)),
        (Cast(int4, Amax(), (1, 48)), 48, amax(int4)),
        (Cast(e2m1, Microscale(), (1, 32)), 32, power),
    ]
    assert_each(cases, check, name=lambda c: str(c[0]))


def test__error_feedback__lowers_the_error_of_products():
    plain, held_out = layer(), correlated(99, 192, 7)
    data = [correlated(256, 192, seed) for seed in range(2)]

    def check(case):
        scheme, more = case
        errors = {}
        for rounding in ("nearest", "error_feedback"):
            config = WeightOnly(*scheme, rounding=rounding, **more)
            model = made(plain, config, data)
            assert isinstance(model[0].weight, QuantizedTensor)
            errors[rounding] = error(model, plain, held_out)
        assert errors["error_feedback"] < 0.85 * errors["nearest"], errors

    options = [{}, {"rotate": True}, {"fold": True}, {"rotate": True, "fold": True}]
    cases = [(s, {}) for s in SCHEMES]
    cases += itertools.product([("nvfp4",), ("mxfp4",), ("int4", 32)], options[1:])
    cases += [(("nvfp4",), {"scale": "least_error"}), (("int4", 32), {"scale": "least_error"})]
    assert_each(cases, check)


def test__error_feedback__with_cast_inputs_and_wide_formats():
    plain, x = layer(), correlated(256, 192)

    def check(config):
        held = type(config)(format=config.format, granularity=config.granularity)
        assert error(made(plain, config, [x]), plain, x) < error(made(plain, held, [x]), plain, x)

    configs = [
        Dynamic("int4", 32, input_format="int8", rounding="error_feedback"),
        Static("int8", "channel", rounding="error_feedback"),
    ]
    assert_each(configs[1:], check)
    assert error(made(plain, configs[0], [x]), plain, x) < 0.08


def test__channels_without_data__are_rounded_to_nearest():
    plain, x = layer(), correlated(256, 192)
    x[:, 5] = 0
    x[:, 64:96] = 0
    both = [
        made(plain, WeightOnly("int4", rounding=r), [x])[0].weight.codes
        for r in ("nearest", "error_feedback")
    ]
    assert torch.equal(both[0][:, 5], both[1][:, 5])
    assert torch.equal(both[0][:, 64:96], both[1][:, 64:96])
    assert not torch.equal(*both)
    # One token has moments of rank one, and the damping makes them definite.
    made(plain, WeightOnly("int4", rounding="error_feedback"), [x[:1]])


CONVOLUTIONS = {
    "1d": (nn.Conv1d(16, 8, 5, stride=2, padding=3, dilation=2), (2, 16, 40)),
    "2d": (nn.Conv2d(16, 8, 3, padding=1), (2, 16, 9, 9)),
    "same": (nn.Conv2d(16, 8, (4, 2), padding="same", dilation=(1, 2)), (2, 16, 9, 9)),
    "groups": (nn.Conv2d(16, 8, 3, groups=4, padding_mode="circular", padding=1), (2, 16, 9, 9)),
    "depthwise": (nn.Conv2d(16, 16, 5, groups=16), (4, 16, 9, 9)),
    "3d": (nn.Conv3d(4, 8, 3, padding=(1, 0, 1)), (1, 4, 6, 6, 6)),
    "one image": (nn.Conv2d(16, 8, 3), (16, 9, 9)),
}


def test__convolutions__are_rounded_with_feedback():
    def check(name):
        conv, shape = CONVOLUTIONS[name]
        plain = nn.Sequential(conv)
        x = gaussian(*shape)
        x = x + x.roll(1, -1) + x.roll(1, -2) + x.roll(2, -1)  # neighbours are alike
        errors = [
            error(made(plain, WeightOnly("int4", rounding=r), [x]), plain, x)
            for r in ("nearest", "error_feedback")
        ]
        assert errors[1] < errors[0], errors

    assert_each(CONVOLUTIONS, check)


def test__windows_of_a_convolution__are_its_inputs():
    """The rows times the matrix of codes are the convolution."""

    def check(name):
        conv, shape = CONVOLUTIONS[name]
        x, w, groups = gaussian(*shape), conv.weight.detach(), conv.groups
        given = {
            "stride": conv.stride,
            "padding": conv.padding,
            "dilation": conv.dilation,
            "groups": groups,
        }
        if conv.padding_mode != "zeros":
            x, given["padding"] = F.pad(x, conv._reversed_padding_repeated_twice, "circular"), 0
        parts = w.reshape(groups, -1, w[0].numel())
        y = torch.cat([rows @ parts[g].T for g, rows in windows(x, w, given)], -1)
        wanted = conv(gaussian(*shape)) - conv.bias.view(-1, *[1] * (w.dim() - 2))
        wanted = wanted.movedim(-w.dim() + 1, -1).reshape(-1, w.shape[0])
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)

    assert_each(CONVOLUTIONS, check)


def test__least_error__never_has_more_error_than_amax():
    w = gaussian(32, 256) * torch.exp(gaussian(32, 256, seed=1))

    def check(case):
        scheme, scale = case
        held = nn.Sequential(nn.Linear(256, 32, bias=False))
        held[0].weight.data = w.clone()
        kinds = [None, "least_error"]
        models = [made(held, WeightOnly(*scheme, scale=k), None)[0].weight for k in kinds]
        assert models[1].config.scale == scale
        assert models[1].scale.dtype == models[0].scale.dtype
        block = models[0].config.granularity
        errors = [(m.dequantize() - w).square() for m in models]
        if block[1]:
            errors = [e.unflatten(1, (-1, block[1])).sum(-1) for e in errors]
        else:
            errors = [e.sum(-1) for e in errors]
        assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
        assert errors[1].sum() < 0.95 * errors[0].sum()

    cases = [
        (("nvfp4",), "two_level_least_error"),
        (("mxfp4",), "e8m0_least_error"),
        (("int4", 32), "amax_least_error"),
        (("int4",), "amax_least_error"),
    ]
    assert_each(cases, check)
    whole = made(layer(), WeightOnly("int4", "tensor", "least_error"), None)[0].weight
    assert whole.config.scale == "least_error"


def test__numbers_that_feedback_would_spread__are_refused_by_name():
    config, x = WeightOnly("int4", rounding="error_feedback"), correlated(64, 192)
    plain = layer()
    with pytest.raises(QuantizationError, match=r"0\.weight: .* beyond float32"):
        made(plain, config, [x * 1e20])
    plain[0].weight.data[3, 5] = float("nan")
    with pytest.raises(QuantizationError, match=r"0\.weight: the weight has a NaN"):
        made(plain, config, [x])
    with pytest.raises(QuantizationError, match="do not fit a matrix"):
        rounded_with_feedback(x, torch.eye(5)[None], Cast(get("int4"), Amax(), (1, 0)))
    with pytest.raises(QuantizationError, match="no negative eigenvalue"):
        factor_of(
            torch.eye(4)[None] - 2 * torch.ones(1, 4, 4).triu(1) - 2 * torch.ones(4, 4).tril(-1)
        )


def test__a_config_that_does_not_fit__changes_nothing():
    plain = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 8))
    config = WeightOnly("int4", rounding="error_feedback", rotate=True)
    with pytest.raises(QuantizationError, match=r"0\.weight: rotate mixes 16"):
        sct.quantize_(plain, config, calibration=[gaussian(4, 24)])
    assert not any(isinstance(p, QuantizedTensor) for p in plain.parameters())
