"""Every exception and warning that the library raises by its own name.

Each also derives from the built-in a caller would expect to catch, so `except ValueError` works.
"""


class ScaledTensorError(Exception):
    """Base of every error that scaledtensor raises on purpose."""


class FormatError(ScaledTensorError, ValueError):
    """An unknown number format, an impossible one, or codes that do not belong to it."""


class DTypeError(ScaledTensorError, TypeError):
    """A tensor of a dtype that the call cannot take."""


class DTypeMismatchError(ScaledTensorError, RuntimeError):
    """Operands of a product have different dtypes. It is a RuntimeError, as torch's own is, and no
    TypeError, whose message Python withholds where an operator such as @ raises it."""


class ScaleError(ScaledTensorError, ValueError):
    """A scale that is not a positive finite number, or not a power of two where one is required."""


class ShapeError(ScaledTensorError, ValueError):
    """Shapes that do not fit together."""


class StorageError(ScaledTensorError, RuntimeError):
    """A ScaledTensor was asked for the address of its memory; it consists of several tensors."""


class RecipeError(ScaledTensorError, ValueError):
    """An unknown recipe name or a field outside what it allows."""


class RecipeWarning(UserWarning):
    """An operator that the recipe does not reach ran without its casts."""


class ModelError(ScaledTensorError, ValueError):
    """A model that cannot be converted, or that was not converted."""


class ModelWarning(UserWarning):
    """Parameters were loaded that may belong to another function of the same code."""


class MupError(ScaledTensorError, ValueError):
    """A parameter without u-muP tags, a tag that cannot be, or a learning-rate rule's option."""


class HardwareError(ScaledTensorError, ValueError):
    """A choice for products that no machine has."""


class RegistryError(ScaledTensorError, ValueError):
    """A rule registered twice, or for something that is not an ATen operator."""


class UnsupportedError(ScaledTensorError, NotImplementedError):
    """A combination that the library knows of and does not support; it names what to do instead."""


class OptionError(UnsupportedError, ValueError):
    """An option of torch's that has no meaning for a unit-scaled function or module."""


class MissingRuleError(ScaledTensorError, NotImplementedError):
    """An operator has no scale rule and the policy is `error`."""


class MissingRuleWarning(UserWarning):
    """An operator has no scale rule; it ran in fp32 and was rescaled by its measured RMS."""


class SaturationWarning(UserWarning):
    """Elements that were written into a part of an 8-bit tensor lie beyond its largest value."""


class TextError(ScaledTensorError, ValueError):
    """A training text that is missing, empty, too short or not text."""


class CheckpointError(ScaledTensorError, ValueError):
    """A checkpoint that is missing, damaged or belongs to another model."""


class DistributedError(ScaledTensorError, RuntimeError):
    """There is no process group, this rank is not in it, or ranks do not agree."""
