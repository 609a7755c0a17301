"""Weights that other libraries quantised, wrote and decoded are read to the same values, and
written again to the same bytes (`samples.json`, see `write_samples.py`)."""

import json
from pathlib import Path
from typing import Any

import torch
from assertions import assert_each
from torch import Tensor

from scaledtensor.exchange import (
    FORMATS,
    compressed_tensors,
    fine_grained,
    gguf,
    modelopt,
    parts_of_weight,
    weight_of_parts,
)
from scaledtensor.exchange.torchao import Described, config_of, describe, extra_parts

SAMPLES = json.loads(Path(__file__).with_name("samples.json").read_text())
READERS = {m.METHOD: m for m in (compressed_tensors, fine_grained, modelopt)}


def tensor(told: dict[str, Any]) -> Tensor:
    raw = torch.tensor(list(bytes.fromhex(told["bytes"])), dtype=torch.uint8)
    return raw.view(getattr(torch, told["dtype"])).reshape(told["shape"])


def read(family: str, sample: dict[str, Any]) -> tuple[Any, Any, dict[str, Tensor]]:
    """The layout, the weight, and the tensors in which the library wrote it."""
    parts = {name: tensor(t) for name, t in sample["parts"].items()}
    n = sample.get("repeated", 1)
    if n > 1:
        codes = parts["weight"].view(torch.uint8)
        wide = codes.repeat_interleave(n, 0).repeat_interleave(n, 1)
        parts["weight"] = wide.view(torch.float8_e4m3fn)
    if family == "gguf":
        layout = next(a for a in gguf.LAYOUTS if a.name == sample["entry"])
        return layout, gguf.weight_of(layout, parts[""], "sample"), parts
    if family == "torchao":
        told = json.loads(sample["entry"])
        names = tuple(f"_weight_{name}" for name in told["_tensor_data_names"])
        layout, config, _ = config_of(
            "sample", Described(told["_type"], told["_data"], names), parts
        )
    else:
        method = READERS[FORMATS[family].method]
        layout, config = method.scheme_reader("sample", sample["entry"])("m", None)
    return layout, weight_of_parts(layout, config, parts, "sample"), parts


def raw(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def cases() -> list[tuple[str, str]]:
    return [(family, name) for family, own in SAMPLES.items() for name in own]


def test__values_of_other_libraries__are_read_to_the_bit() -> None:
    def check(case: tuple[str, str]) -> None:
        family, name = case
        sample = SAMPLES[family][name]
        _, x, _ = read(family, sample)
        n = sample.get("repeated", 1)
        ours, theirs = x.value_in(torch.float32)[::n, ::n], tensor(sample["decoded"])
        if (family, "NVFP4" in name) == ("compressed-tensors", True):
            ours = ours.bfloat16().float()  # that library decodes these to BF16
        # A product of three factors is rounded twice where a library multiplies in float32.
        loose = "NVFP4" in name and family != "compressed-tensors"
        torch.testing.assert_close(ours, theirs, rtol=2.0**-23 if loose else 0, atol=0)

    assert_each(cases(), check)
    assert len(cases()) == 31


def test__weights_of_other_libraries__are_written_as_they_wrote_them() -> None:
    def check(case: tuple[str, str]) -> None:
        family, name = case
        layout, x, parts = read(family, SAMPLES[family][name])
        if family == "gguf":
            if name == "Q4_0":  # its negative scales become 8-bit integers here
                assert str(x.config) == "WeightOnly(int8 amax 1x32)"
                return
            written = {"": gguf.blocks_of(layout, x, "sample")}
        else:
            written = parts_of_weight(layout, x, "sample")
        if family == "torchao":
            written |= extra_parts(layout, x)
            told, ours = json.loads(SAMPLES[family][name]["entry"]), json.loads(describe(layout, x))
            assert ours == told
        expected = {k: t for k, t in parts.items() if k != "_weight_zero_point" or k in written}
        assert written.keys() == expected.keys()
        for key, t in written.items():
            same = t.dtype == parts[key].dtype and t.shape == parts[key].shape
            assert same, f"{key}: {t.dtype}, {tuple(t.shape)} for {tuple(parts[key].shape)}"
            assert torch.equal(raw(t), raw(parts[key])), key

    assert_each(cases(), check)


def test__an_entry_of_compressed_tensors__is_written_as_it_writes_it() -> None:
    def check(name: str) -> None:
        theirs = SAMPLES["compressed-tensors"][name]["entry"]
        layout, x, _ = read("compressed-tensors", SAMPLES["compressed-tensors"][name])
        kinds = {"m": "Linear", "lm_head": "Linear", "table": "Embedding"}
        ours = compressed_tensors.entry({"m": (layout, x.config)}, kinds, ["lm_head", "table"])
        theirs = json.loads(json.dumps(theirs))
        for args in theirs["config_groups"]["group_0"].values():
            if isinstance(args, dict):
                args.pop("observer", None)
        del theirs["moe_sparsity_config"]
        assert ours == theirs

    assert_each(SAMPLES["compressed-tensors"], check)
