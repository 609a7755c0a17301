"""Writes docs/recipes.md from the table of recipes.

    python docs/write_recipes.py > docs/recipes.md

A test fails when the page is not what this prints. The measured tables are kept in
docs/recipes_measured.md, as the benchmarks print them.
"""

import ast
import inspect
import itertools
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

from scaledtensor import recipes
from scaledtensor.recipes import Recipe
from scaledtensor.recipes.base import RECIPES

HEAD = """\
# Recipes

<!-- Written by `python docs/write_recipes.py`; a test compares. Edit the recipes' docstrings. -->

A recipe says how the operands of matrix products are cast. It is frozen data, given by name or as
a record, and one line switches an unchanged model from one to another:

```python
import scaledtensor as sct
from scaledtensor.recipes import MXFP8, Unit

sct.scale_model(model, "current")
sct.scale_model(model, MXFP8(mode="even", overrides={"head": None, "blocks.0": Unit()}))
print(model)  # shows the recipe of each module
```

Parameters stay the objects that they are, so that the optimizer, its states and tied weights go
on, from plain to scaled, from recipe to recipe and back by `unscale_model`.

`overrides` chooses by the name of a module (None leaves it plain), `min_size` leaves small weights
plain, `keep` leaves whole products in the activation format, `saved` keeps what other operators
need for the backward pass in 8 bits, `store_frozen` keeps frozen weights as products cast them
([LoRA on an FP8 base](#lora-on-an-fp8-base)). `recipe.to_json()` and `Recipe.from_json(text)`
write and read one; a model that is saved carries its own. A recipe that contradicts itself is
refused when it is built. Programs written to torchao's FP8 training change an import
(`scaledtensor.compat.torchao.float8`), which has its names and says what differs.

In a product of (tokens, in) by (in, out), "1x32" stands for 32 elements that the product sums over,
and "all" for a whole dimension. A row that names no block has one scale for the tensor. Between the
products flow ScaledTensors in the activation format under the scales of the rules, whatever the
recipe: so each recipe but `constant` gives bit for bit the same gradients, except for their scales,
when the loss is multiplied by a power of two.

A recipe of one scale a tensor (`unit`, `current`, `delayed`, `min_mse`, `constant`) casts each
operand once, for all three products, in every spelling of a product and in convolutions. A recipe
whose scales lie along the dimension that a product sums over casts for each product: every spelling
of a product of two matrices, `einsum` too; `multi_dot`, `bilinear`, an `einsum` of three, grouped
products and convolutions stay in the activation format and say so once by name (`RecipeWarning`);
such a product has no second derivative. For the backward pass autograd keeps an activation in the
codes that this pass will read, and a weight itself.

On a CPU products are emulated exactly: the same values, summed in float32. A CPU with bfloat16
units multiplies them in bfloat16 where that holds them, any other CPU in float32; results are
rounded to the activation format in either case. `sct.hardware()` prints which it is, and what
each recipe will run on. The FP8 units of a CUDA device do products of E4M3FN and E5M2 under
one scale a tensor or a row (compute capability 8.9 and later), under 1x128 by 1x128 or 128x128
(9.0), of MXFP8 (10.0), and the grouped products of experts in E4M3FN under one scale a tensor
(9.0). Everything else is emulated there too: FP4 and FP6, batches of matrices, sizes that are
no multiples of 16. A `RecipeWarning` says so once for each reason. `fast_accumulation` says
which products those units may add up in fewer bits than float32: the forward one, as in
torchao and TransformerEngine. All this is tested against torch's own checks of arguments and
float64 on a CPU; on a device it has not run yet.

## Which one

- `unit`: nothing is measured, nothing is kept, no pass over the data beyond the cast. Start here.
  `Unit(gradient="e4m3fn", overrides={"head": Unit()})` has a third mantissa bit for all gradients
  but the logits' gradients, whose range a vocabulary of 2^17 tokens takes out of E4M3FN (below).
- `current`: as torchao's tensorwise scaling; `Current(granularity="row")` as its rowwise scaling.
  For data whose size the rules do not know: activations of a trained model, outliers.
- `delayed`: one pass over the data where hardware casts and measures at once. The price is a state,
  and that values may grow faster than their history knows.
- `mxfp8`, `blockwise`: outliers that differ from block to block, and what hardware with block
  scales runs.
- `mxfp6`, `mxfp4`, `nvfp4`: what fewer bits would cost.
- `min_mse`, `constant`: the two other ways of arXiv 2309.17224, whose first is `current`.
- `per_gemm`: six casts of your own.

## LoRA on an FP8 base

Under a recipe of one scale a tensor a frozen weight is cast to the same codes at every step. With
`store_frozen=True` the parameter holds these codes, in a quarter of the bytes of FP32, and autograd
keeps the parameter itself, compiled too. Results, gradients and losses are bit for bit the same as
without it (with `delayed` under Inductor, up to a last place here and there):

```python
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.recipes import Unit


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


model = nn.Sequential(LoRA(nn.Linear(256, 1024)), nn.GELU(), LoRA(nn.Linear(1024, 256)))
sct.scale_model(model, Unit(store_frozen=True))
print(model[0].base.weight.format.name, model[0].down.weight.format.name)  # e4m3fn fp32

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
x = torch.randn(64, 256)
loss = (model(x) - x).square().mean()
loss.backward()
optimizer.step()
```

Freeze and load the model first, then scale it. The stored weights are the parameters of two
dimensions whose name ends in "weight" or "proj" and which require no gradient by then, except in
embeddings (tied ones too) and norms; biases and the rest stay in `master`. A checkpoint of codes
brings codes; the recipe casts a checkpoint of wider numbers, and values that are written into a
weight, as by a merge. An optimizer that would step a stored weight raises: to train it after all,
`p.data = p.detach().dequantize()` puts the rounded value into `master`. A weight that is cut up
before its products (one expert of a stack, a chunk) has, where scales are measured, the scale of
the whole and not the scale of the part. Inside a transform of `torch.func`, where products are not
cast, the stored weight is the rounded one still.

Recipes that cast for each product refuse the field; frozen modules take another by `overrides`:
`MXFP8(overrides={"*.base": Current(store_frozen=True)})`.

## Every recipe

"""


def page() -> str:
    measured = Path(__file__).with_name("recipes_measured.md").read_text()
    shared = "## Fields that all have\n\n" + "\n".join(field_lines(Recipe, set()))
    return HEAD + "".join(map(section, sorted(RECIPES))) + shared + "\n\n" + measured


def section(name: str) -> str:
    recipe = RECIPES[name]
    made = recipes.get(name)
    casts = "\n".join(
        f"    {gemm:8} {getattr(made.gemms, gemm)}" for gemm in ("forward", "dgrad", "wgrad")
    )
    shared = {f.name for f in fields(Recipe)}
    own = field_lines(recipe, shared)
    listed = "\n".join(own) + "\n\n" if own else ""
    words = inspect.cleandoc(recipe.__doc__ or "")
    return f"### `{name}`: {recipe.__name__}\n\n{words}\n\n{casts}\n\n{listed}"


def field_lines(recipe: type[Recipe], without: set[str]) -> list[str]:
    """A line for each field: its default and what the class says below it."""
    told = described(recipe)
    lines = []
    for f in fields(recipe):
        if f.name in without:
            continue
        default = getattr(recipe, f.name, None)
        spelled = f" = `{default!r}`" if hasattr(recipe, f.name) else ""
        words = f": {told[f.name]}" if f.name in told else ""
        lines.append(f"- `{f.name}`{spelled}{words}")
    return lines


def described(recipe: type[Recipe]) -> dict[str, str]:
    """The strings below the fields of a class and those it derives from."""
    found: dict[str, str] = {}
    for base in reversed(recipe.__mro__):
        if not (isinstance(base, type) and issubclass(base, Recipe)):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        body = getattr(tree, "body", [])
        for line, after in itertools.pairwise(body):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[line.target.id] = " ".join(str(after.value.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(page())
