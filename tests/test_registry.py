"""Users can add rules, and an operator without a rule is never silent."""

import contextlib
import warnings

import pytest
import torch
from assertions import assert_holds, dequantized
from tensors import gaussian

import scaledtensor as sct
from scaledtensor import ops
from scaledtensor.errors import MissingRuleError, MissingRuleWarning, RegistryError
from scaledtensor.ops import RULES, Raw, missing, operators, registry, rule

aten = torch.ops.aten
sinh = aten.sinh.default


@pytest.fixture
def restored():
    """Remove the rule for sinh; afterwards the rule table and the counter are as they were."""
    tables = (RULES, missing)
    before = [dict(t) for t in tables]
    RULES.pop(sinh)  # These tests remove this rule.
    registry._handlers.clear()
    registry.fingerprint.cache_clear()
    missing.clear()
    yield
    for table, old in zip(tables, before, strict=True):
        table.clear()
        table.update(old)
    registry._handlers.clear()
    registry.fingerprint.cache_clear()


def sample() -> sct.ScaledTensor:
    x = gaussian(64)
    return sct.scaled(x)


def test__a_rule_from_outside__serves_every_form_of_its_operator(restored):
    before = registry.fingerprint()

    @rule(sinh)
    def inverse(x):
        """About x."""
        return Raw(sinh(x.qdata * x.scale), None, x.rms * 1.5)

    assert registry.fingerprint() != before
    assert (RULES[sinh].family, RULES[sinh].words) == ("test_registry", inverse.__doc__)
    want = torch.sinh(dequantized(sample()))
    for out in (
        torch.sinh(sample()),
        sample().sinh_(),
        torch.sinh(sample(), out=torch.zeros(64)),
    ):
        assert_holds(out, want, 2.0**-20)
    assert not missing


def test__a_second_rule__is_an_error_and_changes_nothing(restored):
    with pytest.raises(
        RegistryError, match=r"has a rule already: scaledtensor\.ops\.rules\.arithmetic\.add"
    ):
        rule(sinh, aten.add.Tensor)(lambda x: x)
    assert sinh not in RULES


@pytest.mark.parametrize(
    "given",
    [torch.add, aten.add, "aten.add.Tensor", None],
    ids=["function", "packet", "name", "none"],
)
def test__a_rule_for_something_else__is_an_error(given, restored):
    with pytest.raises(RegistryError, match=r"torch\.ops\.aten\.add\.Tensor"):
        rule(sinh, given)(lambda x: x)
    assert sinh not in RULES


# --- operators that torch has not ------------------------------------------------------------


@pytest.fixture
def waiting():
    """Restore the rules that wait for their module."""
    before = dict(registry._waiting)
    yield
    registry._waiting.clear()
    registry._waiting.update(before)


def test__a_rule_for_an_operator_that_torch_lacks__waits_until_it_is_defined(restored, waiting):
    before = ops.absent()
    given = operators.aten.sinh.default, operators.aten.sinh.of_another_version

    @rule(*given, pass_op=True)
    def halved(op, x):
        return Raw(x.qdata * 0.5, x.scale, x.rms * 0.5)

    assert RULES[sinh].function is halved
    assert set(ops.absent()) - set(before) == {"aten.sinh.of_another_version"}
    library = torch.library.Library("aten", "FRAGMENT")
    try:
        library.define("sinh.of_another_version(Tensor self) -> Tensor")
        op = operators.aten.sinh.of_another_version
        assert_holds(op(sample()), dequantized(sample()) / 2, 0)
        assert RULES[op].function is halved
        assert ops.absent() == before
    finally:
        vars(operators.aten.sinh).pop("of_another_version", None)
        vars(torch.ops.aten.sinh).pop("of_another_version", None)
        library._destroy()


def test__an_operator_that_torch_lacks__says_so_when_it_is_called(waiting):
    op = operators.aten.sinhh.default
    with pytest.raises(sct.errors.UnsupportedError, match=r"has no operator aten\.sinhh\.default"):
        op(sample())
    rule(op)(lambda x: x)
    with pytest.raises(RegistryError, match=r"aten\.sinhh\.default has a rule already"):
        rule(op)(lambda x: x)


def test__the_names_of_operators__are_torchs_own():
    assert operators.aten.add.Tensor is aten.add.Tensor
    assert operators.find("aten.add.Tensor") is aten.add.Tensor
    assert not hasattr(operators.aten, "__wrapped__")
    assert not hasattr(operators.aten.add, "__wrapped__")


# --- the policy ------------------------------------------------------------------------------


def test__error__names_the_operator_and_the_ways_out(restored):
    with pytest.raises(MissingRuleError, match=r"aten\.sinh\.default.*rule.*on_missing"):
        torch.sinh(sample())
    assert not missing


def test__warn__computes_in_float32_counts_and_warns_once(restored):
    x = sample()
    with sct.on_missing("warn"):
        with pytest.warns(MissingRuleWarning, match=r"aten\.sinh\.default"):
            first = torch.sinh(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = torch.sinh(x)
    assert missing == {"aten.sinh.default": 2}
    want = torch.sinh(dequantized(x))
    for out in (first, second):
        assert isinstance(out, sct.ScaledTensor)
        assert_holds(out, want, 2.0**-20)
        assert float(out.scale) == float(sct.scaled(want.float()).scale)


def test__the_policy__is_a_setting_and_a_context_that_restores(restored):
    assert registry.on_missing._now == "error"
    with sct.on_missing("warn"):
        assert registry.on_missing._now == "warn"
        with sct.on_missing("error"):
            assert registry.on_missing._now == "error"
        assert registry.on_missing._now == "warn"
    assert registry.on_missing._now == "error"
    with contextlib.suppress(KeyError), sct.on_missing("warn"):
        raise KeyError
    assert registry.on_missing._now == "error"
    sct.on_missing("warn")
    assert registry.on_missing._now == "warn"
    sct.on_missing("error")


@pytest.mark.parametrize("given", ["ignore", None, True])
def test__another_policy__is_an_error(given):
    with pytest.raises(RegistryError, match="'warn' or 'error'"):
        sct.on_missing(given)
    assert registry.on_missing._now == "error"


@pytest.mark.filterwarnings("ignore::scaledtensor.errors.MissingRuleWarning")
def test__without_a_rule__in_place_and_out_still_write_where_they_are_told(restored):
    x = sample()
    want, address, scale = torch.sinh(dequantized(x)), x.qdata.data_ptr(), float(x.scale)
    with sct.on_missing("warn"):
        assert x.sinh_() is x
        plain = torch.zeros(64)
        assert torch.sinh(sample(), out=plain) is plain
    assert (x.qdata.data_ptr(), float(x.scale)) == (address, scale)
    assert_holds(x, want, 2.0**-20)
    assert_holds(plain, want, 2.0**-20)


FACTORIES = {
    "eye": lambda out: torch.eye(4, 6, out=out),
    "full": lambda out: torch.full((4, 6), 3.0, out=out),
    "linspace": lambda out: torch.linspace(-1, 1, 6, out=out[0]),
    "normal": lambda out: torch.normal(0.0, 1.0, (4, 6), out=out),
    "rand": lambda out: torch.rand(4, 6, out=out),
    "randint": lambda out: torch.randint(0, 4, (4, 6), out=out),
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test__what_reads_no_tensor__needs_no_rule(make):
    """`torch.nn.init.eye_` calls `torch.eye(out=weight)`."""
    got, want = sct.scaled(torch.ones(4, 6)), torch.ones(4, 6)
    with sct.on_missing("error"):
        for out in (got, want):
            torch.manual_seed(0)
            make(out)
    assert_holds(got, want, 0)
    assert float(got.scale) == 1
    assert got.rms > 0


# --- the plumbing ----------------------------------------------------------------------------


def pair() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    plain = [torch.randn(s, generator=rng) for s in (3, 5)]
    return [sct.scaled(t) for t in plain], plain


FOREACH = {
    "add scalar": lambda ts: torch._foreach_add(ts, 2.0),
    "add list": lambda ts: torch._foreach_add(ts, ts, alpha=3.0),
    "mul scalars": lambda ts: torch._foreach_mul(ts, [2.0, 3.0]),
    "mul tensor": lambda ts: torch._foreach_mul(ts, torch.tensor(0.3)),
    "addcmul": lambda ts: torch._foreach_addcmul(ts, ts, ts, value=0.5),
    "addcdiv": lambda ts: torch._foreach_addcdiv(ts, ts, ts, [0.5, 2.0]),
    "lerp": lambda ts: torch._foreach_lerp(ts, [t * 2 for t in ts], 0.25),
    "norm": lambda ts: torch._foreach_norm(ts),
    "sqrt of abs": lambda ts: torch._foreach_sqrt(torch._foreach_abs(ts)),
    "maximum": lambda ts: torch._foreach_maximum(ts, 0.1),
}


@pytest.mark.parametrize("name", FOREACH)
def test__foreach__is_the_operator_on_each_element(name):
    got, want = (FOREACH[name](ts) for ts in pair())
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_holds(g, w, 2.0**-20)


@pytest.mark.parametrize("name", ["mul_", "add_", "sub_", "div_", "maximum_"])
def test__foreach_in_place__keeps_identities_and_scales(name):
    got, want = pair()
    scales = [float(t.scale) for t in got]
    before = list(got)
    for ts in (got, want):
        getattr(torch, f"_foreach_{name}")(ts, 0.5)
    assert all(g is b for g, b in zip(got, before, strict=True))
    assert [float(t.scale) for t in got] == scales
    for g, w in zip(got, want, strict=True):
        assert_holds(g, w, 2.0**-20)


def test__out__of_another_shape__is_an_error_that_writes_nothing():
    out = sct.scaled(torch.ones(2))
    with pytest.raises(sct.errors.ShapeError, match=r"\(64,\) into \(2,\)"):
        torch.neg(sample(), out=out)
    assert_holds(out, torch.ones(2), 0)
