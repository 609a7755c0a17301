"""Helpers of these programs: models of a few thousand parameters, without downloads."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import scaledtensor as sct


def name_operators_of_torchvision() -> Any:
    """Let PyPI's torchvision load beside a CPU build of torch.

    Its compiled part is for CUDA and does not load there. Its Python then fails when it describes
    undefined operators. timm and transformers read only that Python.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        described = (Path(found.origin).parent / "_meta_registrations.py").read_text()
        names = re.findall(r'register_meta\("(\w+)"|"torchvision::(\w+)"', described)
        library = torch.library.Library("torchvision", "DEF")
        for name in {a or b for a, b in names}:
            library.define(f"{name}(Tensor x) -> Tensor")
        return library
    return None


TORCHVISION = name_operators_of_torchvision()


def inner(module: torch.nn.Module) -> dict[str, Any]:
    """Return everything in a model, by name, as numbers that compare."""
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
