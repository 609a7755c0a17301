"""What the programs here share: models of a few thousand parameters, which nothing downloads."""

from typing import Any

import pytest
import torch

import scaledtensor as sct


def inner(module: torch.nn.Module) -> dict[str, Any]:
    """All that a model consists of, by name, as numbers that compare."""
    found: dict[str, Any] = {}
    for name, x in module.state_dict().items():
        if isinstance(x, sct.ScaledTensor):
            found |= {f"{name}:{part}": getattr(x, part).clone() for part in x.INNER}
            found[f"{name}:kind"] = (type(x), x.format, x.dtype, x.recipe)
        else:
            found[name] = x.clone()
    return found


@pytest.fixture
def assert_same_bits():
    """Two models have the same elements, scales, formats, recipes and buffers."""

    def check(one: torch.nn.Module, other: torch.nn.Module) -> None:
        left, right = inner(one), inner(other)
        assert left.keys() == right.keys()
        for name, x in left.items():
            y = right[name]
            same = torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
            assert same, name

    return check
