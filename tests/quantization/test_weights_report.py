"""`sct.report` on a quantised model: its weights, their configs and bytes, and reasons."""

import json

import pytest
import torch
from small_models import GPT
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import ModelError
from scaledtensor.quantization import quantize_


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=64, context=32, layers=3, heads=2, width=64)


def test__the_report__tells_configs_bytes_and_reasons() -> None:
    model = gpt()
    model.head.weight = model.token_embedding.weight
    model.rnn = nn.GRU(8, 8)
    plain = sum(p.nbytes for p in model.parameters())
    nvfp4, fp8 = sct.WeightOnly("nvfp4"), sct.Dynamic("e4m3fn")
    quantize_(model, {"blocks.0.mlp.*": None, "*.mlp.*": nvfp4, "*": fp8})
    found = sct.report(model)
    rows = {r.name: r for r in found.weights}
    assert set(rows) == {n for n, p in model.named_parameters() if p.dim() > 1}
    for name, r in rows.items():
        p = model.get_parameter(name)
        assert (r.bytes, r.elements) == (p.nbytes, p.numel())
        assert r.config == str(getattr(p, "config", ""))
        assert bool(r.config) != bool(r.why)
    assert rows["blocks.1.mlp.0.weight"].plain_bytes == 4 * 64 * 256
    assert rows["token_embedding.weight"].role == "embedding + head"
    assert rows["token_embedding.weight"].why == (
        "tied: token_embedding.weight has the role 'embedding', which is not among the roles of a "
        "config"
    )
    assert "'embedding' is not among" in rows["position_embedding.weight"].why
    assert "filter_fn" in rows["blocks.0.mlp.0.weight"].why
    assert "no layer that quantize_ knows" in rows["rnn.weight_hh_l0"].why
    now = sum(p.nbytes for p in model.parameters())
    text = str(found)
    assert f"the whole model: {now:,} bytes in place of {plain:,}" in text
    assert "10 of 16 weights in few bits" in text
    assert "blocks.1..2.mlp.{0,2}.weight (x 4)" in text
    assert json.loads(json.dumps(found.to_dict()))["weights"][0]["name"] == "token_embedding.weight"
    part = found.where("blocks.1.*")
    assert len(part.weights) == 4
    assert "whole model" not in str(part)
    assert "0 of 0 weights" in str(found.where("nothing"))


def test__models_that_train_or_are_plain__have_a_clear_answer() -> None:
    model = quantize_(gpt(), sct.Dynamic("mxfp8"), train=True)
    assert "13 of 15 weights train for few bits" in str(sct.report(model))
    with pytest.raises(ModelError, match="without inputs"):
        sct.report(model, torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ModelError, match="quantize_"):
        sct.report(gpt())
