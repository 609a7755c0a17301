"""`batch_invariant`: operators give a row the same bits in any batch, and the right value."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from assertions import assert_each
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import scaledtensor as sct
from scaledtensor import _torch, native
from scaledtensor.errors import OptionError, RecipeError, UnsupportedError
from scaledtensor.ops.invariant import elementwise, is_on, kernels
from scaledtensor.recipes import (
    MXFP8,
    NVFP4,
    Constant,
    Current,
    Delayed,
    MinMSE,
    Recipe,
    Unit,
)

DTYPES = (torch.float32, torch.bfloat16)
#: Lengths of rows: around the vectors of a CPU, and with many blocks.
LENGTHS = (1, 2, 7, 8, 9, 31, 33, 64, 100, 129, 515, 1031)


@pytest.fixture(autouse=True)
def same_bits() -> Iterator[None]:
    torch.manual_seed(0)
    with sct.batch_invariant():
        yield
    assert not is_on()


@pytest.fixture(params=["library", "no library"])
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    """With the loops in C++, and on a machine without a compiler."""
    if request.param == "library":
        yield
        return
    with native.left_out():
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are the same. A NaN equals a NaN."""
    return (
        a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


# --- functions of single elements --------------------------------------------------------------


def _function(name: str) -> Callable[..., Tensor]:
    packet, _, overload = name.partition(".")
    found: Callable[..., Tensor] = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return found


_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: _function(name) for name in elementwise.UNARY},
    **{
        name: partial(lambda f, x: f(x.abs() + 0.1, x * 1.7 + 0.3), _function(name))
        for name in elementwise.BINARY
    },
    "10000**x": lambda x: torch.pow(10_000.0, x),
    "number and number": lambda x: torch.hypot(x, torch.tensor(0.7, dtype=x.dtype)),
    "x**3.3": lambda x: (x.abs() + 0.1) ** 3.3,
    "x**-0.5": lambda x: (x.abs() + 0.1) ** -0.5,
    "x**2": lambda x: x**2,
    "x**3": lambda x: x**3,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
    "glu": lambda x: F.glu(torch.stack((x, 0.3 - x), -1), -1).squeeze(-1),
    "selu": F.selu,
    "celu": F.celu,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "hardtanh": F.hardtanh,
    "product and sum": lambda x: torch.addcmul(x, x * 1.3, x * 0.7 + 0.1),
    "quotient and sum": lambda x: torch.addcdiv(x, x * 1.3, x.abs() + 0.1),
    "lerp": lambda x: torch.lerp(x, x * 1.3, 0.3),
    "quotient": lambda x: x / (x.abs() + 0.3),
    "remainder": lambda x: torch.remainder(x, 0.37),
    "in place": lambda x: F.silu(x.clone(), inplace=True),
    "out=": lambda x: torch.sigmoid(x, out=torch.empty(0, dtype=x.dtype)),
}


def _check_elements(name: str, sizes: tuple[int, ...], copies: int) -> None:
    f = _ELEMENTWISE[name]
    bounded = name in ("asin", "acos", "atanh", "erfinv", "logit")
    for dtype in DTYPES:
        x = torch.randn(1100, dtype=dtype) * (0.3 if bounded else 1.5)
        whole = f(x)
        for size in sizes:
            for start in (0, 3):
                part = slice(start, start + size)
                assert equal(f(x[part].clone()), whole[part]), (dtype, size, start)
        assert equal(f(x[5]), whole[5]), "one number"
        assert equal(f(torch.stack((x, -x), 1)[:, 0]), whole), "every second element"
        assert equal(f(x[:1024].view(32, 32).t()).t().reshape(-1), whole[:1024]), "transposed"
        many = x.repeat(copies)  # several threads work on it
        assert equal(f(many), whole.repeat(copies)), "threads"
    x = torch.randn(100) * (0.3 if bounded else 1.5)
    with sct.batch_invariant(False):
        torch.testing.assert_close(f(x), whole_of(f, x), equal_nan=True)


def whole_of(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with sct.batch_invariant():
        return f(x)


def test__functions_of_elements__do_not_depend_on_the_position() -> None:
    sizes = (1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 33, 63, 65, 127, 1023)
    assert_each(_ELEMENTWISE, lambda name: _check_elements(name, sizes, 3))


def test__functions_of_elements__do_not_depend_on_threads(two_threads: None) -> None:
    names = ("silu", "gelu", "sigmoid", "exp", "softplus", "x**3.3", "rsqrt", "tanh", "hypot")
    assert_each(names, lambda name: _check_elements(name, (7, 1023), 61))


def test__operators__would_differ_without_the_setting() -> None:
    """The tests above can fail."""
    x, w = torch.randn(64, 300), torch.randn(300, 300)
    with sct.batch_invariant(False):
        assert not equal(F.silu(x.flatten())[:1023], F.silu(x.flatten()[:1023]))
        assert not equal((x @ w)[:1], x[:1] @ w)


# --- rows --------------------------------------------------------------------------------------

_norm = torch.randn(2, 4100, generator=torch.Generator().manual_seed(0))
_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "sum in float64": lambda x: x.sum(-1, dtype=torch.float64),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1, correction=0),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, -1), -1),
    "norm": lambda x: x.norm(dim=-1),
    "norm of order 1": lambda x: torch.linalg.vector_norm(x, 1, -1),
    "largest": lambda x: torch.linalg.vector_norm(x, math.inf, -1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(
        x.flatten(0, -2), torch.zeros(x.flatten(0, -2).shape[0], dtype=torch.long), reduction="none"
    ),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], *_norm[:, : x.shape[-1]].to(x.dtype)),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], _norm[0, : x.shape[-1]].to(x.dtype)),
    "group_norm": lambda x: F.group_norm(x.flatten(0, -2).unsqueeze(-1), 1).squeeze(-1),
    "batch_norm": lambda x: F.batch_norm(
        x.flatten(0, -2), *_norm[:, : x.shape[-1]].square().to(x.dtype), x.new_ones(x.shape[-1])
    ),
    "cumsum": lambda x: x.cumsum(-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
    "amax": lambda x: x.amax(-1),
}


def _rows_are_alone(f: Callable[[Tensor], Tensor], length: int, dtype: torch.dtype) -> None:
    x = (torch.randn(2, 5, length) * 2).to(dtype)

    whole = f(x).reshape(10, -1)
    for i, row in enumerate(x.flatten(0, 1)):
        assert equal(f(row.unsqueeze(0)).reshape(-1), whole[i]), f"row {i} alone"
    assert equal(f(x[:1]).reshape(5, -1), whole[:5]), "half of the batch"
    assert equal(f(torch.cat([x] * 8)).reshape(80, -1)[-10:], whole), "a large batch"
    apart = torch.stack((x, x * 2), -1)[..., 0]
    assert equal(f(apart).reshape(10, -1), whole), "elements apart"
    columns = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert equal(f(columns).reshape(10, -1), whole), "rows apart"


def test__rows__have_the_same_bits_in_any_batch(both: None) -> None:
    def check(name: str) -> None:
        for dtype in DTYPES:
            for length in LENGTHS if native.library() else LENGTHS[::4]:
                if name in ("var", "var_mean", "group_norm") and length == 1:
                    continue
                _rows_are_alone(_ROWS[name], length, dtype)

    assert_each(_ROWS, check)


def test__rows__do_not_depend_on_threads(two_threads: None) -> None:
    names = ("sum", "mean", "var", "norm", "softmax", "log_softmax", "layer_norm", "group_norm")
    assert_each(names, lambda name: _rows_are_alone(_ROWS[name], 4099, torch.float32))


def test__rows__have_the_right_value(both: None) -> None:
    """Against torch's operators in float64, over one and several dimensions."""
    x = torch.randn(3, 4, 70)
    cases: dict[str, Callable[[Tensor], Tensor]] = {
        **{k: f for k, f in _ROWS.items() if k not in ("layer_norm", "rms_norm", "batch_norm")},
        "all": lambda x: torch.stack((x.sum(), x.mean(), x.norm(), x.var(), x.std())),
        "first": lambda x: torch.cat((x.sum(0), x.mean(0), x.std(0))),
        "two": lambda x: torch.cat((x.sum((0, 2)), x.mean((-1, 0)), x.var((0, 2)))),
        "kept": lambda x: x.sum((0, 2), keepdim=True) + x.logsumexp((0, 2), keepdim=True),
        "softmax of columns": lambda x: torch.cat((x.softmax(1), x.log_softmax(0))),
        "empty": lambda x: x[:0].sum(0) + x[:, :, :0].sum(-1).sum(),
        "out=": lambda x: torch.sum(x, 1, out=torch.empty(0, dtype=x.dtype)),
    }

    def check(name: str) -> None:
        with sct.batch_invariant(False):
            wanted = cases[name](x.double())
        torch.testing.assert_close(cases[name](x).double(), wanted, rtol=1e-5, atol=1e-6)

    assert_each(cases, check)
    assert torch.arange(5).sum().item() == 10  # whole numbers keep torch's operator
    assert torch.ones(3, dtype=torch.bool).sum().item() == 3


def test__softmax__ignores_masked_logits_that_follow(both: None) -> None:
    def check(length: int) -> None:
        x = torch.randn(3, length)
        short = x.softmax(-1)
        for more in (1, 7, 8, 50):
            longer = F.pad(x, (0, more), value=-math.inf).softmax(-1)
            assert equal(longer[:, :length], short)
            assert not longer[:, length:].any()

    assert_each(LENGTHS, check)


# --- products ----------------------------------------------------------------------------------

_PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without a bias": lambda x, w, b: F.linear(x, w) + b,
    "matmul": lambda x, w, b: x @ w.t() + b,
    "addmm": lambda x, w, b: torch.addmm(b, x.flatten(0, -2), w.t()).view(*x.shape[:-1], -1),
    "addmm out=": lambda x, w, b: torch.addmm(
        b, x.flatten(0, -2), w.t(), out=torch.empty(0, dtype=x.dtype)
    ).view(*x.shape[:-1], -1),
    "einsum": lambda x, w, b: torch.einsum("...k,nk->...n", x, w) + b,
    "bmm": lambda x, w, b: torch.bmm(x, w.t().expand(len(x), -1, -1)) + b,
    "baddbmm": lambda x, w, b: torch.baddbmm(b.expand(1, 1, -1), x, w.t().expand(len(x), -1, -1)),
    "mv": lambda x, w, b: torch.stack([torch.addmv(b, w, row) for row in x.flatten(0, -2)]).view(
        *x.shape[:-1], -1
    ),
    "dot": lambda x, w, b: torch.stack(
        [torch.stack([torch.dot(row, v) for v in w]) + b for row in x.flatten(0, -2)]
    ).view(*x.shape[:-1], -1),
    "columns": lambda x, w, b: F.linear(x, w.t().contiguous().t(), b),
    "apart": lambda x, w, b: F.linear(torch.stack((x, x), -1)[..., 0], w, b),
}


def test__products__of_all_spellings_and_batches_have_the_same_bits(both: None) -> None:
    def check(case: tuple[int, torch.dtype]) -> None:
        k, dtype = case
        x, w, b = (torch.randn(s).to(dtype) for s in ((3, 4, k), (9, k), (9,)))
        wanted = F.linear(x, w, b)
        with sct.batch_invariant(False):
            exact = F.linear(x.double(), w.double(), b.double())
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(wanted.double(), exact, rtol=4 * step, atol=step * 4 * k**0.5)
        for name, f in _PRODUCTS.items():
            assert equal(f(x, w, b), wanted), name
            assert equal(f(x[1:2], w, b), wanted[1:2]), f"{name} of one"
            assert equal(f(torch.cat([x] * 9), w, b)[-3:], wanted), f"{name} of many"
        assert equal(F.linear(x[1, 2], w, b), wanted[1, 2])

    lengths = LENGTHS[::2] if native.library() else (33,)
    assert_each([(k, dtype) for k in lengths for dtype in DTYPES], check)


def test__products__in_other_dtypes_and_modes() -> None:
    x, w = torch.randn(6, 40), torch.randn(5, 40)
    for dtype in (torch.float16, torch.float64):
        y = F.linear(x.to(dtype), w.to(dtype))
        assert y.dtype == dtype
        assert equal(F.linear(x[2:3].to(dtype), w.to(dtype)), y[2:3])
    wanted = F.linear(x, w)
    with torch.inference_mode():
        assert equal(F.linear(x, w), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert equal(F.linear(x[:1], w), F.linear(x.bfloat16(), w.bfloat16())[:1])
    with FlopCounterMode(display=False) as counter:
        assert equal(F.linear(x, w), wanted)
    assert counter.get_total_flops() == 2 * 6 * 40 * 5
    assert equal(torch.func.vmap(lambda row: w @ row)(x), wanted)
    assert equal(F.linear(x.as_subclass(_Named), w).as_subclass(Tensor), wanted)
    assert (torch.ones(2, 3, dtype=torch.long) @ torch.ones(3, 2, dtype=torch.long)).sum() == 12
    for beta, alpha in ((0, 1), (0.5, 2)):
        c = torch.full((6, 5), math.nan if beta == 0 else 3.0)
        made = torch.addmm(c, x, w.t(), beta=beta, alpha=alpha)
        torch.testing.assert_close(made, alpha * wanted + (1.5 if beta else 0))


class _Named(Tensor):
    """A subclass without a dispatch of its own."""


# --- attention ---------------------------------------------------------------------------------


def _heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def test__attention__of_a_query_has_the_same_bits_beside_any_other_keys(both: None) -> None:
    """Prefill, training, decoding, padding on both sides, windows, and grouped heads."""

    def check(case: tuple[torch.dtype, int, int, int]) -> None:
        dtype, heads, kept, n = case
        q, k, v = (_heads(2, h, n, 24, dtype=dtype) for h in (heads, kept, kept))
        attend = partial(F.scaled_dot_product_attention, enable_gqa=True, scale=0.3)
        whole = attend(q, k, v, is_causal=True)
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        assert equal(attend(q, k, v, attn_mask=causal), whole)
        added = torch.zeros(2, 1, n, n).masked_fill(~causal, -math.inf).to(dtype)
        assert equal(attend(q, k, v, attn_mask=added), whole)
        for i in {0, n // 2, n - 1}:
            seen = slice(0, i + 1)
            decoded = attend(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen])
            assert equal(decoded, whole[:, :, i : i + 1]), f"decoding of {i}"
            assert equal(attend(q[1:, :, i : i + 1], k[1:, :, seen], v[1:, :, seen]), decoded[1:])
        for left, right in ((3, 0), (0, 5), (5, 2)):
            padded = [F.pad(x, (0, 0, left, right), value=2.0) for x in (q, k, v)]
            mask = F.pad(causal, (left, right, left, right)).expand(2, 1, -1, -1)
            inner = attend(*padded, attn_mask=mask)[:, :, left : left + n]
            assert equal(inner, whole), f"padding {left} {right}"
        window = causal & ~torch.ones(n, n, dtype=torch.bool).tril(-4)
        sliding = attend(q, k, v, attn_mask=window)
        for i in {n // 2, n - 1}:
            one = slice(i, i + 1)
            kept_keys = slice(max(i - 3, 0), i + 1)  # a cache that drops the keys before
            assert equal(
                attend(q[:, :, one], k[:, :, kept_keys], v[:, :, kept_keys]), sliding[:, :, one]
            )
        apart = [x.mT.contiguous().mT for x in (q, k, v)]
        assert equal(attend(*apart, is_causal=True), whole), "another layout"
        hidden = attend(q, k, v, attn_mask=torch.zeros(2, 1, n, n, dtype=torch.bool))
        assert not hidden.any()

    cases = [(d, *c) for d in DTYPES for c in ((4, 4, 1), (4, 2, 9), (6, 1, 37), (2, 2, 70))]
    assert_each(cases, check)


def test__attention__has_the_value_and_the_gradients_of_torch() -> None:
    def check(case: tuple[str, dict[str, object]]) -> None:
        _, how = case
        inputs = [_heads(2, 4, 33, 16).requires_grad_() for _ in range(3)]
        out = F.scaled_dot_product_attention(*inputs, **how)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.square().sum(), inputs)
        with sct.batch_invariant(False):
            wanted = F.scaled_dot_product_attention(*inputs, **how)  # type: ignore[arg-type]
            expected = torch.autograd.grad(wanted.square().sum(), inputs)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)

    some = torch.rand(2, 1, 33, 33) < 0.7
    some[0, 0, 3] = False  # a query without keys
    cases: list[tuple[str, dict[str, object]]] = [
        ("plain", {}),
        ("causal", {"is_causal": True, "scale": 0.4}),
        ("boolean mask", {"attn_mask": some}),
        ("added mask", {"attn_mask": torch.randn(33, 33)}),
    ]
    assert_each(cases, check)


def test__attention__in_parts_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from scaledtensor.ops.invariant import attention

    q, k, v = (_heads(2, 3, 50, 8) for _ in range(3))
    mask = torch.rand(2, 1, 50, 50) < 0.8
    whole = [F.scaled_dot_product_attention(q, k, v, is_causal=True)]
    whole.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    monkeypatch.setattr(attention, "_HELD", 2 * 3 * 50 * 7)
    assert equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), whole[0])
    assert equal(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), whole[1])


# --- training ----------------------------------------------------------------------------------


def test__gradients__are_those_without_the_setting() -> None:
    torch.manual_seed(1)
    layer = nn.Sequential(
        *(nn.Linear(20, 40), nn.SiLU(), nn.LayerNorm(40), nn.BatchNorm1d(7).eval()),
        *(nn.Linear(40, 30), nn.GLU(), nn.Softmax(-1)),
    )
    x = torch.randn(3, 7, 20)

    def gradients() -> list[Tensor]:
        loss = layer(x).std(-1).logsumexp(-1).mean() + layer(x).norm()
        return list(torch.autograd.grad(loss, layer.parameters()))

    made = gradients()
    with sct.batch_invariant(False):
        wanted = gradients()
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-6)


# --- what the setting refuses ------------------------------------------------------------------


def test__refusals__name_the_operator_and_the_way_out() -> None:
    x = torch.randn(2, 3, 8)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    lstm = nn.LSTM(8, 4)

    def encode() -> Tensor:
        with torch.inference_mode():
            return encoder(x)  # type: ignore[no-any-return]

    cases: dict[str, tuple[Callable[[], object], str]] = {
        "convolution": (lambda: F.conv1d(x, torch.randn(4, 3, 3)), "unfold"),
        "recurrent": (lambda: lstm(x), "mkldnn"),
        "encoder": (encode, "set_fastpath_enabled"),
        "batch norm": (lambda: F.batch_norm(x, None, None, training=True), "model.eval"),
        "norm": (lambda: torch.linalg.vector_norm(x, 3, -1), "x.abs"),
        "complex": (lambda: torch.polar(x, x), "a cosine and a sine"),
        "fft": (lambda: torch.fft.rfft(x), "outside of the setting"),
        "product": (lambda: x.prod(-1), "outside of the setting"),
        "sparse": (lambda: torch.sparse.mm(torch.eye(8).to_sparse(), x[0].t()), "SparseCPU"),
    }

    def check(name: str) -> None:
        run, says = cases[name]
        with pytest.raises(UnsupportedError, match="batch_invariant") as error:
            run()
        assert says in str(error.value)
        with sct.batch_invariant(False):
            run()

    assert_each(cases, check)
    with torch.backends.mkldnn.flags(enabled=False):
        y, _ = lstm(x)
        assert equal(lstm(x[:, 1:2])[0], y[:, 1:2])


def test__recipes__that_measure_a_batch_are_refused() -> None:
    def run(recipe: Recipe) -> None:
        model = sct.scale_model(nn.Linear(32, 32), recipe)
        x = sct.ScaledTensor(torch.randn(6, 32), 1.0, "fp32", recipe=recipe)
        y = model(x)
        alone = model(x[2:3])
        assert equal(alone.dequantize()[0], y.dequantize()[2])

    invariant: list[Recipe] = [Unit(), Constant(), Current(granularity="row"), MXFP8()]
    assert_each(invariant, run)
    with pytest.raises(RecipeError, match="State its scale"):
        sct.scale_model(nn.Linear(32, 32), Unit())(torch.randn(6, 32))
    for recipe in (Current(), Delayed(), MinMSE(), NVFP4()):
        with pytest.raises(RecipeError, match=f"{type(recipe).__name__}.*Take Unit"):
            run(recipe)


def test__options__are_checked() -> None:
    for wrong in (0, -1, 2.5, True, "long"):
        with pytest.raises(OptionError, match="context_length"):
            sct.batch_invariant(context_length=wrong)  # type: ignore[arg-type]
    assert is_on()


# --- the setting -------------------------------------------------------------------------------


def test__setting__is_restored(same_bits: None) -> None:
    x, w = torch.randn(64, 300), torch.randn(300, 300)
    fixed = x @ w
    with sct.batch_invariant(False):
        ordinary = x @ w
        assert not equal(fixed, ordinary)
        with sct.batch_invariant():
            assert equal(x @ w, fixed)
        assert equal(x @ w, ordinary)
        with pytest.raises(ZeroDivisionError), sct.batch_invariant():
            raise ZeroDivisionError
        assert equal(x @ w, ordinary)
        before = sct.batch_invariant(True)  # a setting from now on
        assert equal(x @ w, fixed)
        before.__exit__()
        assert equal(x @ w, ordinary)
    assert equal(x @ w, fixed)


def test__kernels__replace_all_forms_of_an_operator() -> None:
    """No replaced operator is one that torch differentiates in parts, and every form is there."""
    places = {(name, key) for name, key, _ in kernels.kernels()}
    for name in (*kernels.REPLACED, *kernels.REFUSED):
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet), overload or "default")
        derived = "Autograd" in torch._C._dispatch_dump(f"aten::{name}")
        assert derived or not _torch.is_composite(found), name
        assert (f"aten::{name}", "CPU") in places
    for form in ("mm.out", "exp_", "addmm_", "sum.IntList_out", "silu.out", "silu_"):
        assert (f"aten::{form}", "CPU") in places, form


def test__compiled_code__runs_eagerly_in_the_setting() -> None:
    w = torch.randn(300, 300)

    def f(x: Tensor) -> Tensor:
        return F.silu(x @ w).softmax(-1)

    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        calls.append(graph)
        return graph.forward

    x = torch.randn(64, 300)
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    assert equal(compiled(x), f(x))
    assert not calls
    with sct.batch_invariant(False):
        compiled(x)
        assert len(calls) == 1
        with sct.batch_invariant():
            assert equal(compiled(x[:1]), f(x)[:1])  # code that is compiled already
        assert len(calls) == 1

        @torch.compile(fullgraph=True, backend="eager")
        def inside(x: Tensor) -> Tensor:
            with sct.batch_invariant():
                return x @ w

        with pytest.raises(Exception, match="batch_invariant"):
            inside(x)
    assert is_on()
