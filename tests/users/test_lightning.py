"""Programs in the style of Lightning have a module, a Trainer and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import gaussian
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import scaledtensor as sct

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from scaledtensor.integrations.lightning import ScaledPrecision


class Module(pl.LightningModule):
    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.losses: list[float] = []
        if scaled:
            sct.scale_model(self.net)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", (self.net(batch[0]) - batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer)]


def loader() -> DataLoader:
    x = gaussian(64, 16)
    return DataLoader(TensorDataset(x), batch_size=4)


def run(module: Module, folder: Path, resume: Path | None = None, **options: Any) -> Any:
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("recipe", ["unit", "delayed", None], ids=str)
def test__fit__goes_on_where_a_checkpoint_was(recipe, tmp_path, assert_same_bits):
    """The model is converted by the plug-in, or by the module itself."""

    def options() -> dict[str, Any]:
        return {} if recipe is None else {"plugins": ScaledPrecision(recipe)}

    torch.manual_seed(0)
    module = Module(recipe is None)
    trainer = run(module, tmp_path / "one", **options())
    assert all(isinstance(p, sct.ScaledTensor) for p in module.parameters())
    resumed = Module(recipe is None)
    run(resumed, tmp_path / "two", tmp_path / "one" / "epoch=0.ckpt", **options())
    assert resumed.losses == module.losses[16:]
    assert_same_bits(module, resumed)
    (found,) = trainer.validate(module, loader(), verbose=False)
    assert found["val"] < 1


def test__a_checkpoint__loads_into_a_plain_module(tmp_path):
    torch.manual_seed(0)
    module = Module()
    run(module, tmp_path, plugins=ScaledPrecision("delayed"))
    plain = Module.load_from_checkpoint(tmp_path / "epoch=2.ckpt")
    assert type(plain.net[0].weight) is nn.Parameter
    assert torch.equal(plain.net[0].weight, module.net[0].weight.dequantize())


def test__the_plug_in__takes_what_scale_model_takes():
    module = Module()
    ScaledPrecision("delayed", lambda m, name: name != "net.2").convert_module(module)
    assert isinstance(module.net[0].weight, sct.ScaledTensor)
    assert not isinstance(module.net[2].weight, sct.ScaledTensor)
    with pytest.raises(sct.errors.RecipeError):
        ScaledPrecision("none of them")
