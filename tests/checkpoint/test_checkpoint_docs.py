"""The examples of the page of checkpoints run as printed."""

import re
from pathlib import Path

import torch

import scaledtensor as sct

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test__the_page_of_checkpoints__runs__and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    training, *others = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)

    def weights(code):
        scope = {}
        torch.manual_seed(0)
        exec(code, scope)
        return [p.qdata.clone() for p in scope["model"].parameters()], scope

    straight, scope = weights(training)
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == [
        "step-000002",
        "step-000003",
    ]
    sct.checkpoint.prune("runs", 1)
    (tmp_path / "runs" / "step-000003").rename(tmp_path / "last")
    weights(training.replace("step < 3", "step < 1"))
    resumed, _ = weights(training)
    assert all(map(torch.equal, straight, resumed))
    for code in others:
        exec(code, scope)
    assert capsys.readouterr().out.startswith("FP32 Unit(")
    assert (tmp_path / "plain.safetensors").exists()
    assert torch.equal(scope["plain"][0].weight, scope["model"][0].weight.dequantize())
    assert torch.equal(scope["other"][0].weight.qdata, scope["model"][0].weight.qdata)
