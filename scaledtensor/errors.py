"""All exceptions and warnings of this library.

Each exception also derives from the built-in exception that fits, so `except ValueError` works.
"""


class ScaledTensorError(Exception):
    """Base class of all exceptions of scaledtensor."""


class FormatError(ScaledTensorError, ValueError):
    """An unknown number format, an impossible one, or codes that do not belong to it."""


class DTypeError(ScaledTensorError, TypeError):
    """A tensor of a dtype that the call cannot take."""


class DTypeMismatchError(ScaledTensorError, RuntimeError):
    """Operands of a product have different dtypes. It is a RuntimeError, like the error of torch.
    If an operator such as @ raises a TypeError, Python hides its message."""


class ScaleError(ScaledTensorError, ValueError):
    """A scale that is not a positive finite number, or not a power of two where one is required."""


class ShapeError(ScaledTensorError, ValueError):
    """Shapes that do not fit together."""


class StorageError(ScaledTensorError, RuntimeError):
    """A ScaledTensor was asked for the address of its memory; it consists of several tensors."""


class RecipeError(ScaledTensorError, ValueError):
    """An unknown recipe, or a field with a value that is not allowed."""


class RecipeWarning(UserWarning):
    """An operator ran without casts, because its recipe does not cover it."""


class QuantizationError(ScaledTensorError, ValueError):
    """A config of `quantize_` that is not allowed, or calibration data that show nothing."""


class ModelError(ScaledTensorError, ValueError):
    """A model that cannot be converted, or that was not converted."""


class ModelWarning(UserWarning):
    """Parameters were loaded that may belong to another function of the same code."""


class MupError(ScaledTensorError, ValueError):
    """A parameter without u-muP tags, an invalid tag, or an invalid option of a learning-rate
    rule."""


class HardwareError(ScaledTensorError, ValueError):
    """An unknown choice of the dtype of products."""


class RegistryError(ScaledTensorError, ValueError):
    """A rule registered twice, or for something that is not an ATen operator."""


class UnsupportedError(ScaledTensorError, NotImplementedError):
    """A combination that the library does not support. The message says what to do instead."""


class OptionError(UnsupportedError, ValueError):
    """An option of torch that has no meaning for a unit-scaled function or module."""


class MissingRuleError(ScaledTensorError, NotImplementedError):
    """An operator has no scale rule and the policy is `error`."""


class MissingRuleWarning(UserWarning):
    """An operator has no scale rule. It ran in float32, and its result was scaled by its measured
    RMS."""


class SaturationWarning(UserWarning):
    """Elements that were written into a part of an 8-bit tensor lie beyond its largest value."""


class TextError(ScaledTensorError, ValueError):
    """A training text that is missing, empty, too short or not text."""


class CheckpointError(ScaledTensorError, ValueError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DistributedError(ScaledTensorError, RuntimeError):
    """There is no process group, this rank is not in it, or ranks do not agree."""
