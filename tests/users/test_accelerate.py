"""Programs in the style of accelerate convert, prepare, save and load."""

from typing import Any

import pytest
import torch
from tensors import gaussian
from torch import nn

import scaledtensor as sct

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def _one_program_a_test():
    """accelerate keeps its state for as long as a process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 32))
    model[3].weight = model[2].weight
    return sct.scale_model(model)


def delayed() -> nn.Module:
    torch.manual_seed(0)
    return sct.scale_model(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32)), "delayed")


class Program:
    """A training loop in the style of accelerate's guide."""

    def __init__(self, make: Any, **options: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for i in range(first, last):
            x = gaussian(8, 16, seed=i)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x) - 1).square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


OPTIONS: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}]


@pytest.mark.parametrize("make", [tied, delayed])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "accumulating in bf16"])
def test__load_state__goes_on_where_save_state_was(make, options, tmp_path, assert_same_bits):
    program = Program(make, **options)
    program.train(0, 14)
    program.accelerator.save_state(tmp_path)
    want = program.train(14, 26)
    other = Program(make, **options)
    other.accelerator.load_state(tmp_path)
    assert other.train(14, 26) == want
    assert_same_bits(program.model, other.model)
    assert (tmp_path / "model.safetensors").exists()


def test__save_model__is_loaded_by_whoever_loads_files(tmp_path, assert_same_bits):
    from safetensors.torch import load_model

    program = Program(tied)
    program.train(0, 3)
    program.accelerator.save_model(program.model, tmp_path)
    one, two, three = tied(), tied(), tied()
    load_model(one, tmp_path / "model.safetensors")
    accelerate.load_checkpoint_in_model(two, tmp_path)
    sct.checkpoint.load_into(three, sct.checkpoint.load_safetensors(tmp_path))
    for model in (one, two, three):
        assert_same_bits(program.model, model)
    assert one[3].weight is one[2].weight


def test__parts_in_several_files__need_all_of_them(tmp_path, assert_same_bits):
    program = Program(delayed)
    program.accelerator.save_model(program.model, tmp_path, max_shard_size=100)
    with pytest.raises(sct.errors.CheckpointError, match="load_safetensors"):
        accelerate.load_checkpoint_in_model(delayed(), tmp_path)
    other = delayed()
    sct.checkpoint.load_into(other, sct.checkpoint.load_safetensors(tmp_path))
    assert_same_bits(program.model, other)


def test__cpu_offload__keeps_the_codes(tmp_path):
    from accelerate.hooks import remove_hook_from_submodules

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8))
    sct.quantize_(model.eval(), sct.WeightOnly("int4", 32))
    x = torch.randn(3, 64)
    with torch.no_grad():
        wanted = model(x)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        for _ in range(2):
            assert model[0].weight.is_meta
            assert torch.equal(model(x), wanted)
        remove_hook_from_submodules(model)
        for name, p in model.named_parameters():
            assert isinstance(p, nn.Parameter), name
            assert not p.is_meta, name
        assert isinstance(model[0].weight, sct.QuantizedTensor)
        assert torch.equal(model(x), wanted)
        # The file that accelerate writes has values, from which codes are not made again.
        accelerate.disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        with pytest.raises(sct.errors.QuantizationError, match="disk_offload"):
            model(x)
