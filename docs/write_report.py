"""Writes docs/report.md: the program on the page, and its output.

    python docs/write_report.py > docs/report.md

A test fails when the page differs from the output of this program. Numbers of other machines differ
in their last digits, and the test leaves numbers out. The model has ReLU, since the report counts
underflows: the tails of GELU's gradient are zero on one kind of CPU and tiny on another.
"""

import contextlib
import io
import sys
import warnings

PROGRAM = """\
import torch
from torch import Tensor, nn

import scaledtensor as sct


@torch.library.custom_op("mylib::wave", mutates_args=())
def wave(x: Tensor) -> Tensor:
    return x.sin()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 100, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = x + wave(x.detach())
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


torch.manual_seed(0)
model = sct.scale_model(Model(), filter_fn=lambda module, name: name != "head")
with torch.no_grad():  # as a training may leave a weight that nothing rebalances
    model.blocks[3].up.weight.qdata.mul_(2.0**8)
print(sct.report(model, torch.randint(0, 100, (8, 16))))
"""

PAGE = """\
# The report on a model

<!-- Written by `python docs/write_report.py`; a test compares. -->

`sct.report(model, *inputs)` runs a wrapped model forward and backward once, and leaves it
unchanged. The report contains:

- **the coverage**: the shares of the FLOPs of all products, and of the bytes that all other
  operators read and write, that ran in the recipe's format, by a rule in 16 or 32 bits, by the
  float32 fallback, and on plain tensors that no wrapped weight reaches;
- **the worst places**, each with the measured number and a remedy. Casts that saturate come
  first. The others are sorted by a share: of elements that underflow, of FLOPs or bytes that the
  recipe does not reach, of the binades of E4M3FN that a drift takes;
- **recipes to try**, each by itself, with the numbers that suggest it. Every cast is measured
  under three scales (its own, the scale of the rules, the amax) and, under the scale of the
  rules, in E4M3FN. A suggestion is about this batch and this state of the model;
- **a row for each operator in each module**, forward and backward. Numbered layers with the same
  rows are one row, with a count and the range of their RMS; a layer that differs has its own row.

A row of the backward pass belongs to the module whose forward pass made it. The sum of a tensor's
gradients belongs to the innermost module around all uses of that tensor.

The report does not measure losses under recipes with a scale for each row or block, since these
recipes cast within the product.

```python
{program}```

prints

```
{printed}```

## Parts of the report, and the report as data

```python
found = sct.report(model, tokens)
print(found.where("blocks.3.*"))  # by the name of modules; * and ? are wildcards
print(found.where(operator="aten.mm*", problem="*"))  # by operator; with any problem
print(found.findings[0].advice, found.suggestions[0].recipe, found.coverage.products["recipe"])
json.dumps(found.to_dict())  # built-in types only
pandas.DataFrame(found.rows())  # a column for each field of a row
```

These are the problems:

{problems}
"""


def printed() -> str:
    """Return the output of the program."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the operator without a rule, which the report lists
        exec(PROGRAM, {"__name__": "page"})
    return out.getvalue()


def page(shown: str) -> str:
    from scaledtensor.inspect.rows import PROBLEMS

    problems = "\n".join(f"- `{name}`: {words}" for name, words in PROBLEMS.items())
    return PAGE.format(program=PROGRAM, printed=shown, problems=problems)


if __name__ == "__main__":
    sys.stdout.write(page(printed()))
