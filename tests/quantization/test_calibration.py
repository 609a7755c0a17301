"""Calibration of `quantize_`: static scales of inputs, and factors that are folded into weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import scaledtensor as sct
from scaledtensor import Dynamic, QuantizedTensor, Static, WeightOnly
from scaledtensor.errors import QuantizationError
from scaledtensor.formats import E4M3FN, encode_blocks, fake_quantize, quantize_blocks
from scaledtensor.quantization.observing import Histogram
from scaledtensor.quantization.products import OPERATORS
from scaledtensor.scales.powers import is_power_of_two
from tests.assertions import assert_each
from tests.tensors import gaussian


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.Linear(64, 8)
    )


def batches(count: int = 3) -> list[torch.Tensor]:
    return [gaussian(16, 32, seed=i) * (1 + i) for i in range(count)]


def quantised(model, config, data=None, **kwargs):
    model = copy.deepcopy(model)
    data = batches() if data is None else data
    return sct.quantize_(model, config, calibration=data, **kwargs)


def scale_of_input(layer) -> float:
    return float(layer.weight.input_scale)


def test__static_scales__follow_from_the_inputs_of_all_batches():
    model, data = network().eval(), torch.cat(batches())
    hidden = model[:4](data)
    magnitudes = data.abs().flatten().double()

    def check(case):
        fmt, observer, wanted, tolerance = case
        made = quantised(network(), Static(fmt, observer=observer, percentile=90.0))
        assert scale_of_input(made[0]) == pytest.approx(float(wanted), rel=tolerance)
        assert made[0].weight.input_scale.dtype == torch.float32

    least = min(
        (2.0**k for k in range(-20, 3)),
        key=lambda s: float((fake_quantize(data / s, E4M3FN) * s - data).double().square().sum()),
    )
    cases = [
        ("e4m3fn", "amax", magnitudes.max() / 448, 1e-7),
        ("int8", "amax", magnitudes.max() / 127, 1e-7),
        ("e4m3fn", "percentile", magnitudes.quantile(0.9, interpolation="higher") / 448, 2**-9),
        ("e4m3fn", "least_error", least, 0),
    ]
    assert_each(cases, check)
    # Dropout and batch normalisation are in evaluation mode.
    made = quantised(network().train(), Static())
    assert scale_of_input(made[4]) == pytest.approx(float(hidden.abs().max()) / 448, rel=1e-6)


def test__a_static_product__is_the_product_of_inputs_cast_by_hand():
    made, x = quantised(network(), Static()), gaussian(4, 32, seed=9)
    layer = made[0]
    scale = layer.weight.input_scale
    entering = fake_quantize(x.double() / scale.double(), E4M3FN) * scale.double()
    wanted = entering @ layer.weight.dequantize().double().T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-5)
    huge = layer(x * 1e4)  # beyond the calibrated range inputs saturate
    assert huge.isfinite().all()


def test__static_inference__measures_nothing():
    class Counter(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            within = OPERATORS.get(func)
            if within is None:
                return func(*args, **(kwargs or {}))
            with self:  # the operators that compute the product
                return within(*args, **(kwargs or {}))

    def measuring(config, data):
        model = sct.quantize_(nn.Sequential(nn.Linear(32, 64)), config, calibration=data)
        x = gaussian(4, 32)
        with Counter() as counter, torch.no_grad():
            model(x)
        print(counter.names)
        assert "quantized_linear" in counter.names
        assert len(counter.names) > 10
        measures = {"amax", "amin", "aminmax", "max", "min", "sum", "mean", "norm", "any", "all"}
        measures |= {"argmax", "linalg_vector_norm", "sort", "topk", "histc", "_local_scalar_dense"}
        return measures & set(counter.names)

    assert not measuring(Static(), batches())
    assert not measuring(Static("int8", observer="percentile"), batches())
    assert measuring(Dynamic(), None)


def test__inputs_of_zeros__give_no_scale():
    model = network()
    with pytest.raises(QuantizationError, match="are zero"):
        sct.quantize_(model, Static(), calibration=[torch.zeros(4, 32)])
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())


def test__a_model__is_as_it_was_after_calibration_and_after_errors():
    def check(case):
        config, data, match = case
        model = network().train()
        state = copy.deepcopy(model.state_dict())
        parameters = dict(model.named_parameters())
        if match is None:
            sct.quantize_(model, config, calibration=data)
        else:
            with pytest.raises(QuantizationError, match=match):
                sct.quantize_(model, config, calibration=data)
            assert all(p is parameters[n] for n, p in model.named_parameters())
            assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
        assert all(m.training for m in model.modules())
        assert torch.equal(model[3].running_mean, state["3.running_mean"])

    nan = gaussian(4, 32)
    nan[1, 2] = float("nan")
    cases = [
        (Static(), batches(), None),
        (Static(), [], "calibration has no batch"),
        (Static(), iter(()), "calibration has no batch"),
        (Static(), None, "needs data"),
        (Static(), gaussian(4, 32), r"got Tensor.*calibration=\[batch\]"),
        (Static(), {"x": gaussian(4, 32)}, r"got dict.*calibration=\[batch\]"),
        (Static(), 3, "got int"),
        (Static(), [nan], "an input of 0.weight has a NaN"),
        (Static(), [gaussian(4, 32) / 0], "an input of 0.weight has an infinity"),
        (Static(), [(gaussian(4, 32), gaussian(4))], "batch 0 .* a tuple, does not fit the model"),
        (Static(), [gaussian(4, 32), "text"], "batch 1 .* a str, does not fit"),
        (Static(), [{"y": gaussian(4, 32)}], "batch 0 .* a dict"),
        (Static(), [gaussian(0, 32)], "reached no product with 0.weight, 4.weight"),
        (WeightOnly(), batches(), "needs none"),
    ]
    assert_each(cases, check, name=lambda c: str(c[2]))


class Branches(nn.Module):
    """One layer runs only for large inputs."""

    def __init__(self):
        super().__init__()
        self.always, self.rare = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x):
        return self.rare(x) if x.abs().max() > 100 else self.always(x)


def test__a_layer_without_data__is_named():
    model = Branches()
    with pytest.raises(QuantizationError, match=r"no product with rare.weight.*\{'rare': None"):
        sct.quantize_(model, Static(), calibration=batches())
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())
    sct.quantize_(model, {"rare": None, "*": Static()}, calibration=batches())
    assert isinstance(model.always.weight, QuantizedTensor)
    assert type(model.rare.weight) is nn.Parameter


class Spelled(nn.Module):
    """One product in some spelling."""

    def __init__(self, spell, *shape):
        super().__init__()
        self.spell, self.weight = spell, nn.Parameter(gaussian(*shape) / 8)

    def forward(self, x):
        return self.spell(x, self.weight)


def looped(x, w):
    return torch.stack([F.linear(x, w[e]) for e in range(len(w))])


def grouped(x, w):
    ends = torch.tensor([5, 5, 16], dtype=torch.int32)
    return F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=ends).float()


#: A spelling -> the shape of its weight, and whether the product sums over its last dimension.
SPELLINGS = {
    "linear": (F.linear, (8, 32), True),
    "matmul of the transpose": (lambda x, w: x @ w.t(), (8, 32), True),
    "mT": (lambda x, w: torch.matmul(x, w.mT), (8, 32), True),
    "T": (lambda x, w: torch.mm(x, w.T), (8, 32), True),
    "columns": (lambda x, w: x @ w, (32, 8), False),
    "addmm": (lambda x, w: torch.addmm(torch.ones(8), x, w), (32, 8), False),
    "weight first": (lambda x, w: (w @ x.mT).mT, (8, 32), True),
    "mv": (lambda x, w: torch.mv(w, x[0]), (8, 32), True),
    "inner": (torch.inner, (8, 32), True),
    "einsum": (lambda x, w: torch.einsum("bk,nk->bn", x, w), (8, 32), True),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([1], [0])), (32, 8), False),
    "experts in a loop": (looped, (3, 8, 32), True),
    "experts by bmm": (lambda x, w: x.expand(3, -1, -1).bmm(w.mT), (3, 8, 32), True),
    "experts by matmul": (lambda x, w: x @ w.mT, (3, 8, 32), True),
    "experts by einsum": (lambda x, w: torch.einsum("bk,enk->ebn", x, w), (3, 8, 32), True),
    "grouped experts": (grouped, (3, 8, 32), True),
}


def test__every_spelling__is_observed():
    x = gaussian(16, 32)

    def check(name):
        spell, shape, last = SPELLINGS[name]
        static = sct.quantize_(Spelled(spell, *shape), Static(), calibration=[x])
        used = x[0] if name == "mv" else x
        used = used.bfloat16() if "grouped" in name else used
        assert scale_of_input(static) == pytest.approx(float(used.abs().max()) / 448, rel=1e-6)
        assert static.weight.order == ("rows" if last else "columns")
        # The rows reach error feedback: the error of products is less than with nearest rounding.
        plain = Spelled(spell, *shape)
        config = WeightOnly("int4", rounding="error_feedback")
        feedback = sct.quantize_(copy.deepcopy(plain), config, calibration=[x])
        nearest = sct.quantize_(copy.deepcopy(plain), WeightOnly("int4"))
        nearest = Spelled(spell, *shape) if not last else nearest
        if not last:  # a channel of the observed order
            nearest.weight.data = quantised_columns(plain.weight)
        errors = [(m(x) - plain(x)).norm() for m in (feedback, nearest)]
        assert errors[0] < errors[1]

    def quantised_columns(w):
        held = Spelled(F.linear, *w.mT.shape)
        held.weight.data = w.detach().mT.contiguous()
        return sct.quantize_(held, WeightOnly("int4")).weight.dequantize().mT

    assert_each(SPELLINGS, check)


def test__layers_of_torch__are_observed():
    """An encoder layer multiplies by its weights in fused operators, and under autocast in
    bfloat16."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)).eval()
    x = gaussian(2, 8, 32)

    def check(autocast):
        config = Static("int8", "channel", rounding="error_feedback")
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            made = quantised(plain, config, [x])
        found = {n for n, p in made.named_parameters() if isinstance(p, QuantizedTensor)}
        assert {n.rpartition("0.")[2] for n in found} == {
            *("self_attn.in_proj_weight", "self_attn.out_proj.weight"),
            *("linear1.weight", "linear2.weight"),
        }
        top = x.bfloat16().float() if autocast else x
        scale = made[0].self_attn.in_proj_weight.input_scale
        assert float(scale) == pytest.approx(float(top.abs().max()) / 127, rel=1e-6)
        with torch.no_grad():
            assert (made(x) - plain(x)).norm() < 0.03 * plain(x).norm()

    assert_each([False, True], check)


def test__folding__keeps_the_product_and_evens_its_channels():
    """SmoothQuant's factors for a model whose inputs have two large channels."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64))
    x = gaussian(64, 32)
    x[:, 3] *= 100
    x[:, 7] *= 30
    x[:, 9] = 0  # a channel without data

    def check(config):
        folds = sct.quantize_(copy.deepcopy(plain), config, calibration=[x])
        columns = folds[0].weight.columns
        assert is_power_of_two(columns).all()
        assert columns[9] == 1
        assert columns[3] > columns[7] > columns.median()
        value = folds[0].weight.dequantize()
        assert (value - plain[0].weight).abs().max() < plain[0].weight.abs().max() * 0.6
        other = type(config)(**{**vars_of(config), "fold": False})
        data = [x] if other.needs_data else None
        straight = sct.quantize_(copy.deepcopy(plain), other, calibration=data)
        errors = [(m(x) - plain(x)).norm() for m in (folds, straight)]
        assert errors[0] < errors[1]

    def vars_of(config):
        names = ("format", "granularity", "rotate")
        return {n: getattr(config, n) for n in names}

    configs = [
        Static("int8", fold=True),
        Static("int8", fold=True, rotate=True),
        Dynamic("int8", fold=True),
        WeightOnly("int4", fold=True),
        WeightOnly("int4", 16, fold=True),
    ]
    assert_each(configs, check)
    # In formats that hold them, folding changes no bit: powers of two move exponents alone.
    exact = sct.quantize_(copy.deepcopy(plain), WeightOnly("e5m2", fold=True), calibration=[x])
    straight = sct.quantize_(copy.deepcopy(plain), WeightOnly("e5m2"))
    assert (exact(x) - plain(x)).norm() <= (straight(x) - plain(x)).norm()


def test__the_measured_scale__is_of_the_folded_and_mixed_input():
    torch.manual_seed(0)
    x = gaussian(64, 32) * torch.linspace(0.1, 30, 32)
    made = quantised(nn.Sequential(nn.Linear(32, 16)), Static("int8", fold=True), [x])
    weight = made[0].weight
    wanted = (x / weight.columns).abs().max() / 127
    assert float(weight.input_scale) == pytest.approx(float(wanted), rel=1e-6)
    # A product in another spelling casts the same input: they agree up to rounding of sums.
    by_einsum = torch.einsum("bk,nk->bn", x, weight)
    torch.testing.assert_close(by_einsum, F.linear(x, weight), rtol=1e-4, atol=1e-4)
    mixed = quantised(nn.Sequential(nn.Linear(32, 16)), Static("int8", rotate=True), [x])
    weight = mixed[0].weight
    by_einsum = torch.einsum("bk,nk->bn", x, weight)
    torch.testing.assert_close(by_einsum, F.linear(x, weight), rtol=1e-4, atol=1e-3)


def test__folding__of_a_convolution():
    conv = nn.Sequential(nn.Conv2d(4, 8, 3))
    x = gaussian(2, 4, 8, 8)
    with pytest.raises(QuantizationError, match="leave convolutions out by roles"):
        sct.quantize_(conv, Dynamic("int8", fold=True), calibration=[x])
    sct.quantize_(conv, WeightOnly("int4", fold=True), calibration=[x])
    assert conv[0].weight.columns.shape == (36,)


def test__a_histogram__states_its_error():
    x = gaussian(10000)
    held = Histogram(x.device)
    for part in x.split(1000):
        held.add(part)
    assert int(held.numbers().sum()) == x.numel()
    for percent in (1.0, 50.0, 99.0, 99.99, 100.0):
        rank = max(1, int(-(-x.numel() * percent // 100)))
        exact = float(x.abs().sort().values[rank - 1])
        assert exact <= float(held.quantile(percent)) <= exact * (1 + 2**-10)


def test__tied_and_looked_up_weights__are_calibrated():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 32)
            self.lm_head = nn.Linear(32, 50, bias=False)
            self.lm_head.weight = self.table.weight

        def forward(self, ids):
            return self.lm_head(self.table(ids))

    ids = torch.arange(50)[None]
    roles = ("linear", "head", "embedding")
    plain = Tied()
    made = sct.quantize_(copy.deepcopy(plain), Static(roles=roles), calibration=[ids])
    assert made.lm_head.weight is made.table.weight
    wanted = float(plain.table.weight.abs().max()) / 448
    assert scale_of_input(made.lm_head) == pytest.approx(wanted, rel=1e-6)
    table = nn.Sequential(nn.Embedding(50, 32))
    config = WeightOnly("int4", roles=roles, rounding="error_feedback")
    sct.quantize_(table, config, calibration=[ids])  # a table has no inputs: rounded to nearest
    assert isinstance(table[0].weight, QuantizedTensor)


def test__encode_blocks__takes_every_kind_of_scale():
    x = gaussian(8, 64)
    for kind in ("e8m0", "fp32", "pow2", "nvfp4"):
        codes, scale = quantize_blocks(x, "e2m1fn", 16, kind)
        assert torch.equal(encode_blocks(x, "e2m1fn", 16, scale), codes)


def of_transformers() -> dict[str, nn.Module]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 60,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    small = {"vocab_size": 60, "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 32}
    gpt2 = transformers.GPT2Config(**small, bos_token_id=0, eos_token_id=1)
    mixtral = transformers.MixtralConfig(**sizes, num_local_experts=3)
    return {
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
        "GPT-2": transformers.GPT2LMHeadModel(gpt2),
        "Mixtral": transformers.MixtralForCausalLM(mixtral),
    }


def test__models_of_transformers__are_calibrated():
    """GPT-2's layers are Conv1D, and Mixtral's experts are matrices of three dimensions."""
    ids = torch.randint(0, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    models = of_transformers()
    encoding = pytest.importorskip("transformers").BatchEncoding
    data = [encoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}), (ids.flip(1),)]

    def check(case):
        name, config, bound = case
        plain = models[name].train()
        made = quantised(plain, config, data)
        assert made.training
        wanted, logits = (m.eval()(input_ids=ids).logits.detach() for m in (plain, made))
        assert (logits - wanted).norm() < bound * wanted.norm()
        for module_name, p in made.named_parameters():
            if isinstance(p, QuantizedTensor):
                assert (p.order == "columns") == (".c_" in module_name)
                assert (p.input_scale is None) == (config.input is None)

    folds = Static("int8", "channel", fold=True)
    feedback = WeightOnly("int4", 16, rounding="error_feedback", rotate=True)
    cases = [
        ("Llama", Static(), 0.08),
        ("GPT-2", folds, 0.03),
        ("GPT-2", feedback, 0.12),
        ("Mixtral", Static(), 0.08),
        ("Mixtral", feedback, 0.12),
    ]
    assert_each(cases, check)
