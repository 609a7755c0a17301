"""Writes docs/recipes.md from the table of recipes.

    python docs/write_recipes.py > docs/recipes.md

A test fails when the page differs from the output of this program. The measured tables are kept in
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
a record. One line switches an unchanged model from one recipe to another:

```python
import scaledtensor as sct
from scaledtensor.recipes import MXFP8, Unit

sct.scale_model(model, "current")
sct.scale_model(model, MXFP8(mode="even", overrides={"head": None, "blocks.0": Unit()}))
print(model)  # shows the recipe of each module
```

Parameters stay the same objects, so the optimizer, its states and tied weights continue: from
plain to scaled, from recipe to recipe, and back by `unscale_model`.

These fields are common to all recipes. `overrides` chooses by the name of a module (None leaves
it plain). `min_size` leaves small weights plain. `keep` leaves whole products in the activation
format. `saved` keeps in 8 bits the tensors that other operators need for the backward pass.
`store_frozen` keeps frozen weights as the codes that products cast them to ([LoRA on an FP8
base](#lora-on-an-fp8-base)).

`recipe.to_json()` writes a recipe and `Recipe.from_json(text)` reads one; a saved model carries
its own. A recipe that contradicts itself raises an error at construction. Programs written for
torchao's FP8 training change one import: `scaledtensor.compat.torchao.float8` has torchao's
names, and its docstring lists the differences.

In a product of (tokens, in) by (in, out), "1x32" stands for 32 elements that the product sums
over, and "all" for a whole dimension. A row that names no block has one scale for the tensor.
Between the products the tensors are ScaledTensors in the activation format, under the scales of
the rules, for every recipe. So with each recipe except `constant`, a loss that is multiplied by a
power of two gives bit for bit the same gradients, except for their scales.

A recipe with one scale per tensor (`unit`, `current`, `delayed`, `min_mse`, `constant`) casts
each operand once, for all three products, in every spelling of a product and in convolutions. A
recipe whose scales lie along the summed dimension casts separately for each product. It covers
every spelling of a product of two matrices, including `einsum`. Under such a recipe `multi_dot`,
`bilinear`, an `einsum` of three operands, grouped products and convolutions stay in the
activation format, and one `RecipeWarning` names each. Products that are cast separately have no
second derivative. For the backward pass autograd keeps an activation in the codes that this pass
will read, and a reference to the weight.

On a CPU products are emulated exactly: they multiply the same values, and sum in float32. A CPU
with bfloat16 units multiplies in bfloat16 if that holds the values, any other CPU in float32.
Results are rounded to the activation format in either case. `sct.hardware()` prints the dtype,
and the hardware that each recipe will use.

The FP8 units of a CUDA device run these products: E4M3FN and E5M2 under one scale a tensor or a
row (compute capability 8.9 and later), under 1x128 by 1x128 or 128x128 (9.0), MXFP8 (10.0), and
the grouped products of experts in E4M3FN under one scale a tensor (9.0). All other products are
emulated there too: FP4 and FP6, batches of matrices, sizes that are not multiples of 16. A
`RecipeWarning` says so once for each reason. `fast_accumulation` says which products those units
may add up in fewer bits than float32; by default only the forward one, as in torchao and
TransformerEngine. All this is tested against torch's own checks of arguments and against float64
on a CPU. It has not run on a device yet.

## Choosing a recipe

- `unit` measures nothing, keeps no state, and makes no pass over the data beyond the cast. Start
  here. `Unit(gradient="e4m3fn", overrides={"head": Unit()})` has a third mantissa bit for all
  gradients except the gradients of the logits, whose range leaves E4M3FN with a vocabulary of
  2^17 tokens (below).
- `current` scales like torchao's tensorwise scaling, and `Current(granularity="row")` like its
  rowwise scaling. It is for data whose size the rules do not know: activations of a trained
  model, outliers.
- `delayed` makes one pass over the data, if hardware casts and measures at once. It costs one
  buffer per weight, and a sudden growth can exceed its history.
- `mxfp8` and `blockwise` are for outliers that differ from block to block, and for hardware with
  block scales.
- `mxfp6`, `mxfp4` and `nvfp4` show the cost of fewer bits.
- `min_mse` and `constant` are the two other methods of arXiv 2309.17224, whose first method is
  `current`.
- `per_gemm` takes six casts of your own.

## LoRA on an FP8 base

Under a recipe with one scale per tensor a frozen weight is cast to the same codes at every step.
With `store_frozen=True` the parameter holds these codes, in a quarter of the bytes of FP32, and
autograd keeps a reference to the parameter, in compiled code too. Results, gradients and losses
are bit for bit the same as without it (with `delayed` under Inductor, except for a last place
here and there):

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

Freeze and load the model first, then scale it. The stored weights are the parameters that require
no gradient by then and that products multiply by: the matrices of torch's linear, convolution and
attention layers, and in other classes matrices named `weight`, `proj`, `*_weight` or `*_proj`.
Embeddings (tied ones too), norms, biases and all other parameters stay in `master`. A checkpoint of
codes loads as codes. The recipe casts a checkpoint of wider numbers, and values that are written
into a weight, as by a merge. An optimizer that would step a stored weight raises an error. To train
the weight after all, `p.data = p.detach().dequantize()` puts the rounded value into `master`. If
scales are measured, a weight that is cut up before its products (one expert of a stack, a chunk)
has the scale of the whole weight, not the scale of the part. Inside a transform of `torch.func`,
where products are not cast, the stored weight is still the rounded one.

Recipes that cast separately for each product raise an error for this field. Give frozen modules
another recipe by `overrides`: `MXFP8(overrides={"*.base": Current(store_frozen=True)})`.

## Every recipe

"""


def page() -> str:
    measured = Path(__file__).with_name("recipes_measured.md").read_text()
    shared = "## Common fields\n\n" + "\n".join(field_lines(Recipe, set()))
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
    """Return a line for each field: its default and the string below it in the class."""
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
    """Return the strings below the fields of a class and of its bases."""
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
