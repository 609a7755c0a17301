"""The public names. Adding one is a decision; changing or removing one breaks somebody."""

import functools
import importlib
import inspect

import public_names

import scaledtensor as sct
from scaledtensor.tensors.ruled import Ruled
from scaledtensor.tensors.wrapper import Wrapper

ERRORS = {
    "CheckpointError": "ValueError",
    "DTypeError": "TypeError",
    "DTypeMismatchError": "RuntimeError",
    "DistributedError": "RuntimeError",
    "FormatError": "ValueError",
    "HardwareError": "ValueError",
    "MissingRuleError": "NotImplementedError",
    "MissingRuleWarning": "UserWarning",
    "ModelError": "ValueError",
    "ModelWarning": "UserWarning",
    "MupError": "ValueError",
    "QuantizationError": "ValueError",
    "RecipeError": "ValueError",
    "RecipeWarning": "UserWarning",
    "RegistryError": "ValueError",
    "SaturationWarning": "UserWarning",
    "ScaleError": "ValueError",
    "ScaledTensorError": "Exception",
    "ShapeError": "ValueError",
    "StorageError": "RuntimeError",
    "TextError": "ValueError",
    "UnsupportedError": "NotImplementedError",
    "OptionError": "ValueError",
}

MEMBERS = [
    "INNER",
    "apply_",
    "as_subclass",
    "context",
    "cut",
    "data",
    "data_ptr",
    "dequantize",
    "facts",
    "from_facts",
    "fsdp_post_all_gather",
    "fsdp_pre_all_gather",
    "granularity",
    "is_shared",
    "kind",
    "kinds",
    "lent",
    "like",
    "make",
    "memo",
    "nbytes",
    "new",
    "numpy",
    "put_together",
    "rescale",
    "rms",
    "scale",
    "share_memory_",
    "site",
    "storage",
    "to_format",
    "tolist",
    "viewed",
    "widened",
]


@functools.cache
def things() -> dict[str, object]:
    """Return the object of each public name."""
    lines = (line.split() for line in public_names.frozen())
    return {f"{m}.{n}": getattr(importlib.import_module(m), n, None) for m, n in lines}


def test__public_names__are_frozen():
    command = "after a decision: python tests/public_names.py"
    assert public_names.current(public_names.modules()) == public_names.frozen(), command
    assert [name for name, thing in things().items() if thing is None] == []


def test__errors__have_a_base_and_a_builtin_that_callers_expect():
    classes = {n: c for n, c in vars(sct.errors).items() if inspect.isclass(c)}
    assert {n: c.__bases__[-1].__name__ for n, c in classes.items()} == ERRORS
    for c in classes.values():
        assert issubclass(c, (sct.errors.ScaledTensorError, Warning))
        assert c.__doc__


def test__members_of_scaled_tensor__are_frozen():
    own = {n for c in (sct.ScaledTensor, Ruled, Wrapper) for n in vars(c) if not n.startswith("_")}
    assert sorted(own) == MEMBERS


def test__public_functions_and_classes__say_what_they_do():
    said = {n: inspect.getdoc(t) for n, t in things().items() if _is_documented(t)}
    assert len(said) > 250
    assert [name for name, text in said.items() if not text] == []


def _is_documented(thing: object) -> bool:
    return inspect.isclass(thing) or inspect.isfunction(thing)
