"""The public names. Adding one is a decision; changing or removing one breaks somebody."""

import importlib
import inspect

import pytest

import scaledtensor as sct

PUBLIC = {
    "scaledtensor": [
        "CodedTensor",
        "Format",
        "PerAxis",
        "PerBlock",
        "PerTensor",
        "ScaledTensor",
        "__version__",
        "drop",
        "errors",
        "formats",
        "on_missing",
        "ops",
        "rebalance",
        "rebalance_every",
        "recipes",
        "report",
        "scale_model",
        "scaled",
        "statistics",
        "unscale_model",
    ],
    "scaledtensor.formats": [
        "BF16",
        "E2M1FN",
        "E2M3FN",
        "E3M2FN",
        "E3M4",
        "E4M3",
        "E4M3B11FNUZ",
        "E4M3FN",
        "E4M3FNUZ",
        "E5M2",
        "E5M2FNUZ",
        "E8M0FNU",
        "FORMATS",
        "FP16",
        "FP32",
        "Format",
        "Granularity",
        "INT4",
        "INT8",
        "MXINT8",
        "PerAxis",
        "PerBlock",
        "PerTensor",
        "Specials",
        "TwoLevelScale",
        "custom",
        "decode",
        "dequantize_blocks",
        "encode",
        "fake_quantize",
        "from_dtype",
        "get",
        "pack",
        "quantize_blocks",
        "random_key",
        "unpack",
    ],
    "scaledtensor.coded": ["CodedTensor"],
    "scaledtensor.model": ["scale_model", "unscale_model"],
    "scaledtensor.ops": ["RULES", "Raw", "Rule", "missing", "on_missing", "rule"],
    "scaledtensor.rebalance": ["Statistics", "rebalance", "rebalance_every", "statistics"],
    "scaledtensor.recipes": ["Recipe", "Unit", "get"],
    "scaledtensor.report": ["Report", "Row", "report"],
    "scaledtensor.scale": [
        "MAX_SCALE",
        "MIN_SCALE",
        "checked_scale",
        "is_power_of_two",
        "nearest_power_of_two",
        "quadrature",
        "settle",
        "settle_in_place",
        "settle_product",
    ],
    "scaledtensor.tensor": [
        "APPEARANCES",
        "Context",
        "Engine",
        "ScaledTensor",
        "appearance",
        "check_storable",
        "check_strided",
        "from_plain",
        "is_parameter",
        "is_storable",
        "measured_rms",
        "under_scale",
        "with_autograd",
    ],
    "scaledtensor.verbs": [
        "LIBRARY",
        "dequantize",
        "drop",
        "gradient_to_format",
        "operator",
        "promote",
        "rescale",
        "to_format",
    ],
    "scaledtensor.wrap": ["scaled"],
}

ERRORS = {
    "CheckpointError": "ValueError",
    "DTypeError": "TypeError",
    "FormatError": "ValueError",
    "MissingRuleError": "NotImplementedError",
    "MissingRuleWarning": "UserWarning",
    "ModelError": "ValueError",
    "RecipeError": "ValueError",
    "RegistryError": "ValueError",
    "ScaleError": "ValueError",
    "ScaledTensorError": "Exception",
    "ShapeError": "ValueError",
    "TextError": "ValueError",
    "UnsupportedError": "NotImplementedError",
}

MEMBERS = [
    "INNER",
    "data",
    "decoded",
    "dequantize",
    "granularity",
    "is_shared",
    "like",
    "make",
    "numpy",
    "rescale",
    "share_memory_",
    "to_format",
    "tolist",
    "viewed",
]


@pytest.mark.parametrize("name", PUBLIC)
def test__all__is_frozen(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == PUBLIC[name]
    for public in module.__all__:
        assert getattr(module, public) is not None


def test__errors__have_a_base_and_a_builtin_that_callers_expect():
    classes = {n: c for n, c in vars(sct.errors).items() if inspect.isclass(c)}
    assert {n: c.__bases__[-1].__name__ for n, c in classes.items()} == ERRORS
    for c in classes.values():
        assert issubclass(c, (sct.errors.ScaledTensorError, Warning))
        assert c.__doc__


def test__members_of_scaled_tensor__are_frozen():
    own = vars(sct.ScaledTensor)
    assert sorted(n for n in own if not n.startswith("_")) == MEMBERS


@pytest.mark.parametrize("name", PUBLIC)
def test__public_functions_and_classes__say_what_they_do(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        thing = getattr(module, public)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), f"{name}.{public} has no docstring"
