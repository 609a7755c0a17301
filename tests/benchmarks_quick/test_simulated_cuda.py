"""Eager training runs on a simulated CUDA device: with its rules, few launches and few waits."""

import json

import pytest
import torch
from separately import printed

import scaledtensor as sct
from scaledtensor.apps.gpt import GPT, GPTConfig

pytestmark = pytest.mark.kinds

PROGRAM = """
    from benchmarks.simulated_cuda import counted, start
    start()
    import json
    import torch
    import scaledtensor as sct
    from benchmarks.launches_eager import steps
    print(json.dumps({row: steps(row) for row in ("bf16", "unit", "current")}))
"""

REFUSED = """
    from benchmarks.simulated_cuda import start
    start()
    import torch
    import scaledtensor as sct
    layer = sct.scale_model(torch.nn.Linear(16, 16).cuda())
    x = torch.ones(16, 16, device="cuda")
    try:
        layer(x.cpu())
    except RuntimeError as error:
        print("mixed:", str(error)[:60])
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        layer(x)
    except sct.errors.UnsupportedError as error:
        print("captured:", error)
"""

WRITES = """
    from benchmarks.simulated_cuda import counted, start
    start()
    import torch
    import scaledtensor as sct
    from scaledtensor.scales.singles import scale_of
    x = sct.scaled(torch.randn(64, device="cuda"))
    view = x.view(8, 8)
    for change in (
        lambda: x.scale.fill_(4.0),
        lambda: x.copy_(torch.randn(64, device="cuda") * 100),
        lambda: x.mul_(2.0),
        lambda: torch._foreach_copy_([x.scale], [torch.tensor(0.5, device="cuda")]),
        lambda: x.scale.data.fill_(8.0),
        lambda: setattr(x, "data", sct.scaled(torch.randn(64, device="cuda") * 1000)),
    ):
        change()
        assert float(scale_of(x)) == x.scale.item(), change
        assert torch.equal((x * 1).dequantize(), x.dequantize())
    kept = x.scale
    (x * 1)
    kept.fill_(2.0)
    assert float(scale_of(x)) == 2.0
    with counted() as counts:
        for _ in range(5):
            x * 1
    assert counts.waits <= 2, counts
    assert x.scale.device.type == view.scale.device.type == "cuda"
    print("right")
"""


COMPILED = """
    from benchmarks.simulated_cuda import start
    start()
    import torch
    from torch import nn
    import scaledtensor as sct
    from scaledtensor.scales.singles import rms_of, scale_of
    torch.manual_seed(0)
    model = sct.scale_model(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    step = torch.compile(optimizer.step, backend="aot_eager")
    forward = torch.compile(model, backend="aot_eager")
    x, moved = torch.randn(64, 32, device="cuda"), 0
    for _ in range(10):
        forward(x).square().mean().backward()
        before = [float(scale_of(p)) for p in model.parameters()]
        step()
        optimizer.zero_grad()
        known = [(float(scale_of(p)), float(rms_of(p))) for p in model.parameters()]
        assert known == [(p.scale.item(), p.rms.item()) for p in model.parameters()]
        moved += before != [scale for scale, _ in known]
    print("moved", moved)
"""


def losses_on_cpu(recipe):
    torch.manual_seed(0)
    model = sct.scale_model(GPT(GPTConfig(64, 64, 2, 2, 64)), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(64, (4, 64))
    losses = []
    for _ in range(3):
        loss = model(tokens, tokens)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test__training__is_that_of_a_cpu__with_few_launches_and_waits():
    found = json.loads(printed(PROGRAM).splitlines()[-1])
    for recipe in ("unit", "current"):
        losses = [step["loss"] for step in found[recipe]]
        assert losses == pytest.approx(losses_on_cpu(recipe), abs=5e-3)
    plain, ours = found["bf16"][-1], found["unit"][-1]
    # A cast takes six launches, where a product of BF16 has at most a copy.
    assert ours["forward"] <= 2.5 * plain["forward"]
    assert ours["backward"] <= 3.5 * plain["backward"]
    assert ours["step"] <= 3 * plain["step"]
    # The norms measure in their backward passes, and the loss divides a plain number.
    assert ours["waits"] <= 5 + 4


def test__a_tensor_of_the_cpu_and_a_capture__are_refused():
    out = printed(REFUSED)
    assert "mixed: " in out
    assert "captured: a CUDA graph does not record eager operators" in out
    assert 'torch.compile(model, mode="reduce-overhead")' in out


def test__a_remembered_scale__follows_every_write():
    assert printed(WRITES).endswith("right\n")


def test__a_remembered_scale__follows_compiled_steps():
    """A compiled step writes into scales, and counts no write."""
    assert printed(COMPILED).endswith("moved 1\n")
