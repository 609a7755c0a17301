"""`quantize_`: weights in few bits, in a model that stays plain."""

import copy
import io
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import scaledtensor as sct
from scaledtensor import Dynamic, QuantizedTensor, WeightOnly, native
from scaledtensor.errors import ModelError, QuantizationError, UnsupportedError
from scaledtensor.formats import dequantize_blocks, quantize_blocks
from scaledtensor.quantization.configs import config_from
from tests.assertions import assert_each

CONFIGS = [
    WeightOnly(),
    WeightOnly("e5m2", "tensor", "power_of_two"),
    WeightOnly("e4m3fn", "tensor", "least_error"),
    WeightOnly("int8"),
    WeightOnly("int4", 32),
    WeightOnly("e3m2fn", 32),
    WeightOnly("nvfp4"),
    WeightOnly("mxfp4"),
    WeightOnly("mxfp8"),
    WeightOnly("fp8_block"),
    WeightOnly("nvfp4", rotate=True),
    Dynamic(),
    Dynamic(input_granularity="tensor"),
    Dynamic("int8"),
    Dynamic("mxfp8"),
    Dynamic("nvfp4"),
    Dynamic("fp8_block"),
    Dynamic("int4", 32, input_format="int8"),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.LayerNorm(160), nn.Linear(160, 32))


def inputs(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def test__a_weight__has_the_values_of_quantize_blocks():
    weight = network()[0].weight.detach()
    kinds = {"e8m0": "e8m0", "two_level": "nvfp4", "amax": "fp32", "power_of_two": "pow2"}

    def check(config):
        block = tuple(n or -1 for n in config.granularity)
        codes, scale = quantize_blocks(weight, config.format, block, kinds[config.scale])
        wanted = dequantize_blocks(codes, scale, config.format, block)
        held = sct.quantize_(network(), config)[0].weight
        assert isinstance(held, QuantizedTensor)
        assert not held.requires_grad
        assert torch.equal(held.dequantize(), wanted)

    plain = [c for c in CONFIGS if not c.rotate and c.scale in kinds and c.granularity != (0, 0)]
    assert_each(plain, check)


def test__a_product__is_the_product_of_the_values():
    x = inputs()

    def check(config):
        model = sct.quantize_(network(), config)
        weight, layer = model[0].weight, model[0]
        values = weight.dequantize().double()
        entering = sct.quantization.inputs.cast_values(x, config, None, -1)
        if config.input is None:
            assert torch.equal(entering, x)
        wanted = entering.double() @ values.T + layer.bias.double()
        y = layer(x)
        assert type(y) is torch.Tensor
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
        if config.input is not None:
            assert 0 < (entering - x).norm() / x.norm() < 0.25
        with torch.inference_mode():
            assert torch.equal(layer(x), y)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        with native.left_out():  # as on a machine without a compiler
            torch.testing.assert_close(layer(x), y, rtol=1e-5, atol=1e-5)
        many = inputs(150)  # more rows than the loop takes
        alone = torch.allclose(layer(many)[:5], layer(many[:5]), rtol=1e-5, atol=1e-5)
        # The amax of the whole batch is in a scale per tensor, and in NVFP4's second level.
        assert alone != (config in (Dynamic(input_granularity="tensor"), Dynamic("nvfp4")))

    assert_each(CONFIGS, check)


def test__compiled__equals_eager():
    x = inputs()

    def check(config):
        torch._dynamo.reset()
        model = sct.quantize_(network(), config)
        with torch.no_grad():
            compiled, eager = torch.compile(model, fullgraph=True)(x), model(x)
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)

    assert_each([WeightOnly(), Dynamic()], check)


def test__the_gradient__reaches_the_input_and_not_the_weight():
    def check(config):
        model = sct.quantize_(network(), config)
        x = inputs().requires_grad_()
        model(x).square().sum().backward()
        plain = sct.unscale_model(copy.deepcopy(model))
        other = inputs().requires_grad_()
        plain(other).square().sum().backward()
        assert model[0].weight.grad is None
        assert model[0].bias.grad is not None
        error = (x.grad - other.grad).norm() / other.grad.norm()
        assert error < (1e-5 if config.input is None else 0.2), error

    assert_each([CONFIGS[i] for i in (0, 6, 10, 11)], check)


class Every(nn.Module):
    """Products in the spellings of other people's models."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.filter = nn.Conv1d(16, 16, 3, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.experts_proj = nn.Parameter(torch.randn(4, 32, 16) * 0.2)
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.filter(self.table(ids).transpose(1, 2)).transpose(1, 2)
        x, _ = self.attention(x, x, x)
        one_by_one = [F.linear(x, self.experts_proj[i]) for i in range(4)]
        batched = torch.bmm(x[:1].expand(4, -1, -1), self.experts_proj.transpose(1, 2))
        summed = torch.einsum("btk,enk->btn", x, self.experts_proj)
        return self.lm_head(torch.stack(one_by_one).sum(0) + batched.sum(0) + summed)


def test__every_spelling__is_covered():
    torch.manual_seed(0)
    model = Every().eval()
    ids = torch.arange(21).view(3, 7)
    wanted = model(ids)
    every = ("linear", "convolution", "head", "embedding")
    for config, bound in ((WeightOnly("int8", roles=every), 0.02), (Dynamic("int8"), 0.03)):
        held = sct.quantize_(copy.deepcopy(model), config)
        names = {n for n, p in held.named_parameters() if isinstance(p, QuantizedTensor)}
        table = {"table.weight"} if "embedding" in config.roles else set()
        assert names == table | {
            "experts_proj",
            "filter.weight",
            "attention.in_proj_weight",
            "attention.out_proj.weight",
            "lm_head.weight",
        }
        y = held(ids)
        assert 0 < (y - wanted).norm() / wanted.norm() < bound
        lower = held.bfloat16()(ids)
        assert lower.dtype == torch.bfloat16
        assert (lower - wanted).norm() / wanted.norm() < bound + 0.02
    with torch.autocast("cpu", torch.bfloat16):
        assert held.float()(ids).dtype == torch.bfloat16


def test__which_weights__follows_from_roles_names_ties_and_the_filter():
    def converted(model):
        return [n for n, p in model.named_parameters() if isinstance(p, QuantizedTensor)]

    mixed = {"0": WeightOnly("int4", 16), "3": WeightOnly(), "*": None}
    model = sct.quantize_(network(), mixed)
    assert [model[i].weight.format.name for i in (0, 3)] == ["int4", "e4m3fn"]
    assert converted(sct.quantize_(network(), {"3": WeightOnly()})) == ["3.weight"]
    only = sct.quantize_(network(), WeightOnly(), lambda module, fqn: fqn == "0")
    assert converted(only) == ["0.weight"]

    tied = Every()
    tied.lm_head = nn.Linear(16, 50, bias=False)
    tied.lm_head.weight = tied.table.weight
    assert "table.weight" not in converted(sct.quantize_(copy.deepcopy(tied), WeightOnly()))
    roles = ("linear", "head", "embedding")
    both = sct.quantize_(tied, WeightOnly(roles=roles))
    assert both.lm_head.weight is both.table.weight
    assert isinstance(both.table.weight, QuantizedTensor)


def test__print__shows_the_config__and_unscale_model_ends_it():
    model = sct.quantize_(network(), WeightOnly("nvfp4"))
    assert "bias=True, WeightOnly(e2m1fn two_level 1x16))" in repr(model)
    value = model[0].weight.dequantize()
    sct.unscale_model(model)
    assert repr(model) == repr(network())
    assert torch.equal(model[0].weight, value)
    assert type(model[0].weight) is nn.Parameter


def test__copies_and_files__keep_the_codes():
    def check(config):
        model = sct.quantize_(network(), config)
        wanted = model(inputs())
        assert torch.equal(copy.deepcopy(model)(inputs()), wanted)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = sct.quantize_(network(), config)
        with torch.no_grad():
            other[0].bias.zero_()
        other.load_state_dict(torch.load(file, weights_only=True))
        assert torch.equal(other(inputs()), wanted)
        with pytest.raises(UnsupportedError, match=r"before quantize_\(\)"):
            other[0].weight.data.copy_(torch.zeros(160, 64))
        assert config_from(config.to_json()) == config

    assert_each(CONFIGS, check)


def test__plain_values_of_its_own__are_written_and_others_are_refused():
    """DistributedDataParallel writes the values of rank 0 into the weights of all ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = sct.quantize_(network(), WeightOnly("nvfp4"))
        held, codes = model[0].weight, model[0].weight.qdata.clone()
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert torch.equal(wrapped(inputs()), model(inputs()))
        assert torch.equal(held.qdata, codes)
        with torch.no_grad(), pytest.raises(UnsupportedError, match="codes of another one"):
            held.copy_(held.dequantize() + 1)
        assert torch.equal(held.qdata, codes)
    finally:
        dist.destroy_process_group()


def test__every_linear_layer__is_converted_also_with_one_row_or_column():
    def check(case):
        config, (rows, columns) = case
        model = nn.Sequential(nn.Linear(columns, rows))
        sct.quantize_(model, config)
        x = torch.randn(3, columns)
        held = model[0].weight
        assert isinstance(held, QuantizedTensor)
        if config.input is None:
            wanted = F.linear(x, held.dequantize(), model[0].bias)
            torch.testing.assert_close(model(x), wanted)
        else:
            assert model(x).isfinite().all()

    mixing = [c for c in CONFIGS if c.rotate]  # 16 elements along the summed dimension
    others = [c for c in CONFIGS if not c.rotate]
    shapes = (1, 16), (16, 1), (1, 1)
    assert_each([(c, shapes[0]) for c in mixing] + list(product(others, shapes)), check)


def test__adapters_of_peft__stay_as_they_are():
    class Adapted(nn.Module):
        adapter_layer_names = ("lora_A",)

        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 4)})

    model = nn.Sequential(Adapted(), nn.Linear(8, 8))
    sct.quantize_(model, WeightOnly())
    assert isinstance(model[0].base_layer.weight, QuantizedTensor)
    assert isinstance(model[1].weight, QuantizedTensor)
    assert model[0].lora_A["default"].weight.requires_grad
    rows = {row.name: row.why for row in sct.report(model).weights}
    assert rows["0.lora_A.default.weight"].startswith("an adapter of peft")


def test__a_filter_of_another_signature__is_named():
    for bad, match in (
        (["0"], "got list"),
        (lambda name: True, "two arguments"),
    ):
        with pytest.raises(QuantizationError, match=match):
            sct.quantize_(network(), WeightOnly(), bad)


def test__jit_trace__is_an_error_that_names_export():
    for convert in (sct.scale_model, lambda m: sct.quantize_(m, WeightOnly())):
        model = convert(network())
        with pytest.raises(UnsupportedError, match=r"torch\.export\.export"):
            torch.jit.trace(model, inputs())


def test__jit_script__is_an_error_until_the_model_is_plain_again():
    for convert in (sct.scale_model, lambda m: sct.quantize_(m, Dynamic())):
        model = convert(network())
        for held in (model, nn.Sequential(model), copy.deepcopy(model), reloaded(model)):
            with pytest.raises(UnsupportedError, match=r"torch\.export\.export"):
                torch.jit.script(held)
        sct.unscale_model(model)
        assert torch.equal(torch.jit.script(model)(inputs()), model(inputs()))


def reloaded(model: nn.Module) -> nn.Module:
    kept = io.BytesIO()
    torch.save(model, kept)
    kept.seek(0)
    return torch.load(kept, weights_only=False)


def test__flops_of_products__are_counted():
    def counted(model: nn.Module) -> int:
        counter = FlopCounterMode(display=False)
        with counter:
            model(inputs().requires_grad_()).sum().backward()
        return counter.get_total_flops()

    def check(config):
        plain = network()
        for p in (plain[0].weight, plain[3].weight):
            p.requires_grad_(False)
        products = 5 * 64 * 160 + 5 * 160 * 32
        wanted = 2 * 2 * products  # of the results, and of the gradients of inputs
        assert counted(plain) == counted(sct.quantize_(network(), config)) == wanted
        trains = sct.quantize_(network(), config, train=True)
        assert counted(trains) == counted(network()) == 3 * wanted // 2

    assert_each([WeightOnly(), WeightOnly("nvfp4", rotate=False), Dynamic()], check)


def test__a_model_converted_in_inference_mode__records_gradients_later():
    model = network()
    with torch.inference_mode():
        sct.quantize_(model, WeightOnly())
    model(inputs().requires_grad_()).sum().backward()
    assert model[0].bias.grad is not None


def test__few_bits__take_few_bytes():
    sizes = {}
    for name in ("e4m3fn", "int4", "nvfp4", "mxfp4"):
        config = WeightOnly(name, 32) if name == "int4" else WeightOnly(name)
        w = sct.quantize_(nn.Linear(256, 256), config).weight
        sizes[name] = sum(getattr(w, part).nbytes for part in w.INNER) / (256 * 256 * 4)
    bounds = {"e4m3fn": 0.26, "int4": 0.157, "nvfp4": 0.141, "mxfp4": 0.133}
    assert all(sizes[name] < bound for name, bound in bounds.items()), sizes


def test__bad_input__is_named_and_changes_nothing():
    model = network()
    cases = [
        (lambda: sct.quantize_(3, WeightOnly()), ModelError, "takes an nn.Module; got int"),
        (lambda: sct.quantize_(model, WeightOnly), QuantizationError, r"WeightOnly\(\)"),
        (lambda: sct.quantize_(model, "int8"), QuantizationError, "got 'int8'"),
        (lambda: sct.quantize_(model, {"nope": None}), QuantizationError, "'nope'"),
        (lambda: sct.quantize_(nn.ReLU(), WeightOnly()), QuantizationError, "no weight"),
        (lambda: sct.quantize_(model, sct.Static()), QuantizationError, "calibration=batches"),
        (lambda: sct.quantize_(model, WeightOnly(), calibration=[]), QuantizationError, "none"),
        (lambda: WeightOnly("fp32"), QuantizationError, "8 bits or fewer"),
        (lambda: WeightOnly("e9m9"), QuantizationError, "schemes are mxfp8"),
        (lambda: WeightOnly(granularity=-1), QuantizationError, "granularity"),
        (lambda: WeightOnly(scale="max"), QuantizationError, "'amax'"),
        (lambda: WeightOnly(roles=("norm",)), QuantizationError, "'linear'"),
        (lambda: sct.Static(observer="min"), QuantizationError, "'percentile'"),
        (lambda: sct.Static("e4m3fn", input_format="nvfp4"), QuantizationError, "Dynamic"),
        (lambda: sct.quantize_(sct.scale_model(network()), WeightOnly()), ModelError, "unscale"),
        (lambda: config_from('{"config": "none"}'), QuantizationError, "weight_only"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    assert not any(isinstance(p, QuantizedTensor) for p in model.parameters())

    held = sct.quantize_(network(), WeightOnly())
    for call, error, message in [
        (lambda: sct.quantize_(held, WeightOnly("int8")), ModelError, "quantised already"),
        (lambda: sct.scale_model(held), ModelError, "unscale_model"),
        (lambda: held[0].weight.mul_(2), UnsupportedError, "unscale_model"),
        (lambda: held(torch.ones(2, 63)), RuntimeError, "cannot be multiplied"),
    ]:
        with pytest.raises(error, match=message):
            call()
