"""Every function that takes a format takes its record, its name and its torch dtype, and refuses
others."""

import numpy as np
import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor import formats
from scaledtensor.errors import DTypeError, FormatError
from scaledtensor.formats import BF16, E2M1FN, E4M3FN, E5M2, FORMATS, describe
from scaledtensor.formats import numpy as fnp

X = torch.linspace(-3, 3, 64).view(2, 32)
CODES = formats.encode(X, E4M3FN)
SCALE = torch.ones(2, 1)
GROUPS = formats.quantize_expanded(X, E4M3FN, 32)

#: A call of each function, with a format.
DOORS = {
    "encode": lambda f: formats.encode(X, f),
    "decode": lambda f: formats.decode(CODES, f),
    "fake_quantize": lambda f: formats.fake_quantize(X, f),
    "pack": lambda f: formats.pack(CODES, f),
    "unpack": lambda f: formats.unpack(CODES, f, X.shape),
    "quantize_blocks": lambda f: formats.quantize_blocks(X, f, 32)[0],
    "encode_blocks": lambda f: formats.encode_blocks(X, f, 32, SCALE),
    "dequantize_blocks": lambda f: formats.dequantize_blocks(CODES, SCALE, f, 32),
    "quantize_expanded": lambda f: formats.quantize_expanded(X, f, 32).codes,
    "dequantize_expanded": lambda f: formats.dequantize_expanded(GROUPS, f, 32),
    "numpy.encode": lambda f: fnp.encode(X.numpy(), f),
    "numpy.decode": lambda f: fnp.decode(CODES.view(torch.uint8).numpy(), f),
    "numpy.fake_quantize": lambda f: fnp.fake_quantize(X.numpy(), f),
    "numpy.pack": lambda f: fnp.pack(CODES.view(torch.uint8).numpy(), f),
    "numpy.quantize_blocks": lambda f: fnp.quantize_blocks(X.numpy(), f, 32)[0],
    "scaled": lambda f: sct.scaled(X, f).dequantize(),
    "scaled by rows": lambda f: sct.scaled(X, f, granularity=sct.PerAxis(0)).dequantize(),
    "to_format": lambda f: sct.scaled(X).to_format(f).dequantize(),
    "ScaledTensor": lambda f: sct.ScaledTensor(CODES, 1.0, f).dequantize(),
    "CodedTensor": lambda f: sct.CodedTensor(CODES, SCALE, f, 32).dequantize(),
    "recipes.Unit": lambda f: sct.recipes.Unit(forward=f, weight=f, saved=f),
    "recipes.Cast": lambda f: sct.recipes.Cast(f),
    "simulate_format": lambda f: (
        sct.simulate_format(nn.Identity(), f, f).forward.args[0].transforms
    ),
    "inspect.tracking": lambda f: sct.inspect.tracking(nn.Identity(), f, f).__enter__().forward,
    "distributed.Wire": lambda f: sct.distributed.Wire(f),
    "describe.facts": describe.facts,
    "describe.policies": describe.policies,
    "describe.specials": describe.specials,
    "describe.values": describe.values,
    "describe.outcome": lambda f: describe.outcome(f, [1.0]),
}


@pytest.mark.parametrize("door", DOORS)
def test__a_name_and_a_dtype__are_the_format(door):
    wanted = DOORS[door](E4M3FN)
    for given in ("e4m3fn", "E4M3FN", torch.float8_e4m3fn):
        found = DOORS[door](given)
        if isinstance(wanted, torch.Tensor):
            assert found.dtype is wanted.dtype
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        elif isinstance(wanted, np.ndarray):
            assert found.dtype == wanted.dtype
            assert found.tobytes() == wanted.tobytes()
        else:
            assert found == wanted


@pytest.mark.parametrize("door", DOORS)
def test__what_is_no_format__is_named(door):
    for given in ("e9m9", torch.float64, torch.uint8, 8):
        with pytest.raises(ValueError, match=f"(unknown format|no format is stored as) .?{given}"):
            DOORS[door](given)


def test__get__takes_every_dtype_that_has_a_format():
    for fmt in FORMATS.values():
        if fmt.storage_dtype is not torch.uint8:  # Several formats share this dtype.
            assert formats.get(fmt.storage_dtype) is fmt
    with pytest.raises(FormatError, match="The others go by their names: e4m3, e3m4"):
        formats.get(torch.uint8)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("encode", (E4M3FN,)),
        ("decode", (E4M3FN,)),
        ("fake_quantize", (E4M3FN,)),
        ("pack", (E2M1FN,)),
        ("unpack", (E2M1FN, (2, 32))),
        ("quantize_blocks", (E4M3FN, 32)),
        ("encode_blocks", (E4M3FN, 32, SCALE)),
        ("dequantize_blocks", (SCALE, E4M3FN, 32)),
        ("quantize_expanded", (E4M3FN,)),
    ],
)
def test__what_is_no_tensor__is_sent_to_the_door_of_numpy(name, rest):
    where = f"of scaledtensor.formats.{name} is a torch.Tensor; got .*scaledtensor.formats.numpy"
    for given in (np.ones((2, 32), np.float32), [[1.0] * 32] * 2, 1.0, None):
        with pytest.raises(DTypeError, match=where):
            getattr(formats, name)(given, *rest)


@pytest.mark.parametrize("given", [SCALE.numpy(), SCALE.tolist()])
def test__scales_that_are_no_tensors__are_sent_there_too(given):
    two = formats.TwoLevelScale(given, torch.ones(()))
    for scale in (given, two, fnp.TwoLevelScale(SCALE.numpy(), np.float32(1))):
        with pytest.raises(DTypeError, match=r"scaledtensor\.formats\.numpy"):
            formats.dequantize_blocks(CODES, scale, E4M3FN, 32)
    with pytest.raises(DTypeError, match=r"scaledtensor\.formats\.numpy"):
        formats.encode_blocks(X, E4M3FN, 32, given)


def test__optimizers__take_records_and_dtypes():
    def trained(state_format, master_format):
        p = nn.Parameter(torch.linspace(-1, 1, 256, dtype=torch.bfloat16))
        optimizer = sct.optim.AdamW(
            [p], state_format=state_format, master_format=master_format, compiled=False
        )
        p.grad = torch.linspace(1, -1, 256, dtype=torch.bfloat16)
        optimizer.step()
        return p.detach(), optimizer.state_dict()

    wanted, kept = trained("e4m3fn", "fp32")
    for given in ((E4M3FN, formats.FP32), (torch.float8_e4m3fn, torch.float32), ("E4M3FN", "FP32")):
        found, same = trained(*given)
        assert torch.equal(found, wanted)
        (group,) = same["param_groups"]
        assert (group["state_format"], group["master_format"]) == ("e4m3fn", "fp32")
        assert same["state"][0]["exp_avg"].format is E4M3FN
    assert kept["state"].keys() == same["state"].keys()
    groups = [{"params": [nn.Parameter(torch.ones(4))], "state_format": E5M2}]
    assert sct.optim.SGD(groups, momentum=0.9).param_groups[0]["state_format"] == "e5m2"
    for bad in (torch.float64, 3):
        with pytest.raises(FormatError):
            sct.optim.AdamW([nn.Parameter(torch.ones(4))], state_format=bad)
    with pytest.raises(FormatError, match=r"state_format is one of 'fp32', .*; got 'e3m4'"):
        sct.optim.Adam([nn.Parameter(torch.ones(4))], state_format=formats.E3M4)


@torch.compile(fullgraph=True)
def _all_spellings(x, held):
    named = formats.decode(formats.encode(x, "e4m3fn"), torch.float8_e4m3fn)
    packed = formats.pack(formats.encode(x, "e2m1fn"), "e2m1fn")
    held = held.to_format(torch.bfloat16).to_format("e4m3fn")
    return named, packed, formats.fake_quantize(x, torch.float8_e5m2), held


def test__every_spelling__compiles():
    named, packed, rounded, held = _all_spellings(X, sct.scaled(X))
    assert torch.equal(named, formats.fake_quantize(X, E4M3FN))
    assert torch.equal(packed, formats.pack(formats.encode(X, E2M1FN), E2M1FN))
    assert torch.equal(rounded, formats.fake_quantize(X, E5M2))
    wanted = sct.scaled(X).to_format(BF16).to_format(E4M3FN)
    assert held.format is E4M3FN
    assert torch.equal(held.scale, wanted.scale)
    assert torch.equal(held.dequantize(), wanted.dequantize())
