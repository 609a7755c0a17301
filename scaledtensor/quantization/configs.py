"""Configs of `quantize_`: how the weight and the input of a product are cast for inference.

    WeightOnly   the weight is stored in few bits; the input of its products stays as it is
    Dynamic      the input is cast too, under a scale from its own amax, in each call
    Static       the input is cast too, under a scale that `calibration` chose once

A config is frozen data. Its `weight` and its `input` are `Cast`s, the same records that the recipes
of training use (`scaledtensor.recipes.casts`). A `Cast` says format, scale and the elements that
share a scale. The short names of `SCHEMES` stand for a format with its blocks and scales.
"""

import fnmatch
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch.utils._pytree import register_constant

from scaledtensor.errors import FormatError, QuantizationError, RecipeError
from scaledtensor.formats import E4M3FN, Format, FormatLike
from scaledtensor.formats import get as get_format
from scaledtensor.recipes.casts import Amax, Cast, LeastError, Microscale, Scale, TwoLevel

__all__ = [
    "CONFIGS",
    "GRANULARITIES",
    "OBSERVERS",
    "ROLES",
    "SCALES",
    "SCHEMES",
    "Config",
    "Dynamic",
    "Granularity",
    "Plan",
    "Static",
    "WeightOnly",
    "config_from",
    "plan_of",
]

#: Name of a scale -> the choice of scales that it stands for. For blocks and channels,
#: "least_error" is written out as the name of their scale with "_least_error".
SCALES: dict[str, Scale] = {
    "amax": Amax(),
    "power_of_two": Amax(power_of_two=True),
    "e8m0": Microscale(),
    "two_level": TwoLevel(),
    "least_error": LeastError(),
    "amax_least_error": Amax(least_error=True),
    "e8m0_least_error": Microscale(least_error=True),
    "two_level_least_error": TwoLevel(least_error=True),
}

#: Name of a granularity -> the block (across, along) that shares a scale. 0 is all of a direction.
GRANULARITIES = {"tensor": (0, 0), "channel": (1, 0)}

#: Short name -> format, block and scale. The sources are OCP MX 1.0, NVIDIA's NVFP4 and DeepSeek-V3
#: (arXiv 2412.19437).
SCHEMES: dict[str, tuple[str, tuple[int, int], str]] = {
    "mxfp8": ("e4m3fn", (1, 32), "e8m0"),
    "mxfp6": ("e3m2fn", (1, 32), "e8m0"),
    "mxfp4": ("e2m1fn", (1, 32), "e8m0"),
    "nvfp4": ("e2m1fn", (1, 16), "two_level"),
    "fp8_block": ("e4m3fn", (128, 128), "amax"),
}

#: Kinds of weights that a config can choose.
ROLES = ("linear", "convolution", "head", "embedding")

#: How `Static` chooses the scale of an input from the calibration data.
OBSERVERS = ("amax", "percentile", "least_error")

Granularity = str | int | tuple[int, int]
"""The elements that share a scale: "tensor", "channel" (for inputs "token"), a number of elements
along the summed dimension, or a block (across, along)."""


@dataclass(frozen=True)
class Config:
    """The fields of all configs. `WeightOnly`, `Dynamic` and `Static` are the configs to use.

    Raises:
        QuantizationError: a field has a value that is not allowed, or two fields contradict.
    """

    format: FormatLike = E4M3FN
    """Format of the weight: a format, its name, its torch dtype, or a name of `SCHEMES`."""
    granularity: Granularity | None = None
    """Elements of the weight that share a scale. None takes the block of the scheme, or else
    "channel"."""
    scale: str | None = None
    """A name of `SCALES`. None takes the scale of the scheme, or else "amax". "least_error" tries
    scales of this kind that are near it, and takes the one with the least squared error for each
    block."""
    rounding: str = "nearest"
    """"nearest", or "error_feedback": each column's rounding error is spread over the columns that
    are still to be rounded (Frantar et al., GPTQ, arXiv 2210.17323). It needs `calibration`."""
    fold: bool = False
    """Whether exact powers of two move large channels of the input into the weight (Xiao et al.,
    SmoothQuant, arXiv 2211.10438). It needs `calibration`."""
    rotate: bool = False
    """Whether an orthogonal Hadamard matrix mixes weight and input along the summed dimension, 16
    elements at a time (Ashkboos et al., arXiv 2404.00456)."""
    roles: tuple[str, ...] = ("linear", "convolution", "head")
    """Kinds of weights to convert, out of `ROLES`. A head is the output layer of the vocabulary. A
    weight with two owners is converted only if the roles of both are listed."""

    #: The name in files, and in `print(model)`.
    name: ClassVar[str] = ""
    #: Whether `quantize_` needs calibration data for the scale of inputs.
    static: ClassVar[bool] = False

    weight: Cast = field(init=False, repr=False, compare=False)
    """How the weight is cast, with the summed dimension last."""

    def __post_init__(self) -> None:
        if type(self) is Config:
            raise QuantizationError("a config is WeightOnly(...), Dynamic(...) or Static(...)")
        fmt, block, scale = self._chosen("", self.granularity, self.scale, "channel")
        self._set(format=fmt, granularity=block, scale=scale)
        self._set(weight=self._cast(fmt, block, scale))
        if self.rounding not in ("nearest", "error_feedback"):
            raise self._error("rounding", "'nearest' or 'error_feedback'")
        for name in ("fold", "rotate"):
            if not isinstance(getattr(self, name), bool):
                raise self._error(name, "True or False")
        if isinstance(self.roles, list):
            object.__setattr__(self, "roles", tuple(self.roles))
        if not isinstance(self.roles, tuple) or not set(self.roles) <= set(ROLES):
            raise self._error("roles", f"a tuple of {', '.join(map(repr, ROLES))}")

    @property
    def input(self) -> Cast | None:
        """How the input of a product is cast. None leaves it as it is."""
        return None

    @property
    def needs_data(self) -> bool:
        """Whether `quantize_` needs calibration data."""
        return self.static or self.fold or self.rounding != "nearest"

    def to_json(self) -> str:
        """This config as a line of JSON, from which `config_from` rebuilds it."""
        return json.dumps({"config": self.name, **self._values()}, separators=(",", ":"))

    def _values(self) -> dict[str, Any]:
        """All fields that differ from their defaults, and the fields of the weight's cast."""
        found: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.init and (f.name in _SPELLED or value != f.default):
                value = list(value) if isinstance(value, tuple) else value
                found[f.name] = value.name if isinstance(value, Format) else value
        return found

    def __str__(self) -> str:
        more = [w for w in ("fold", "rotate") if getattr(self, w)]
        if self.rounding != "nearest":
            more.append(self.rounding)
        casts = str(self.weight) if self.input is None else f"{self.weight}, input {self.input}"
        return f"{type(self).__name__}({', '.join((casts, *more))})"

    # --- checks ------------------------------------------------------------------------------

    def _error(self, name: str, allowed: str) -> QuantizationError:
        return QuantizationError(
            f"{type(self).__name__}.{name} is {allowed}; got {getattr(self, name)!r}"
        )

    def _set(self, **values: Any) -> None:
        """Write fields of this frozen record. A scheme is written out, so that configs that mean
        the same compare equal."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _chosen(
        self, prefix: str, granularity: Any, scale: Any, usual: str
    ) -> tuple[Format, tuple[int, int], str]:
        """The format, block and scale of the weight, or of the input if `prefix` is "input_"."""
        given = getattr(self, f"{prefix}format")
        scheme = SCHEMES.get(given.lower()) if isinstance(given, str) else None
        name, block, kind = scheme or (given, usual, "amax")
        try:
            fmt = get_format(name)
        except FormatError as error:
            raise QuantizationError(
                f"{type(self).__name__}.{prefix}format: {error}. The schemes are "
                f"{', '.join(SCHEMES)}"
            ) from error
        if fmt.bits > 8:
            raise self._error(f"{prefix}format", "a format of 8 bits or fewer")
        found = self._block(block if granularity is None else granularity, f"{prefix}granularity")
        if scale == "least_error" and (scheme or found != (0, 0)):
            scale = f"{kind}_least_error"
        kind = kind if scale is None else scale
        if kind not in SCALES:
            raise self._error(f"{prefix}scale", f"one of {', '.join(map(repr, SCALES))}")
        return fmt, found, kind

    def _block(self, given: Any, name: str) -> tuple[int, int]:
        if isinstance(given, str) and given in (*GRANULARITIES, "token"):
            return GRANULARITIES["channel" if given == "token" else given]
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return (1, given)
        if isinstance(given, (tuple, list)) and len(given) == 2:
            return (given[0], given[1])
        raise self._error(
            name, "'tensor', 'channel', 'token', a number of elements, or a block (across, along)"
        )

    def _cast(self, fmt: Format, block: tuple[int, int], scale: str) -> Cast:
        try:
            return Cast(fmt, SCALES[scale], block)
        except RecipeError as error:
            raise QuantizationError(f"{type(self).__name__}: {error}") from error


@dataclass(frozen=True)
class WeightOnly(Config):
    """The weight is stored in few bits. The input of its products stays as it is.

        WeightOnly("e4m3fn")                 one float32 scale for each output channel
        WeightOnly("int4", 128)              one for each 128 elements along the summed dimension
        WeightOnly("nvfp4"), ("mxfp4")       the blocks and scales of these schemes

    A product decodes the weight and adds in float32.
    """

    name: ClassVar[str] = "weight_only"


@dataclass(frozen=True)
class Dynamic(Config):
    """The weight is stored in few bits. The input is cast in each call, under its own amax.

    Under `torch.compile` and in eager code the values are the same. A product of two FP8 operands
    runs on the FP8 units of a device that has them.
    """

    input_format: FormatLike | None = None
    """Format of inputs; defaults to the format or the scheme of the weight."""
    input_granularity: Granularity | None = None
    """Elements of the input that share a scale; defaults to the block of the scheme, or "token":
    the features of one token. "tensor" makes a result depend on the whole batch."""
    input_scale: str | None = None
    """A name of `SCALES`; None takes the scale of the scheme, or else "amax"."""

    _input: Cast = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "dynamic"

    def __post_init__(self) -> None:
        if self.input_format is None:
            self._set(input_format=self.format)
        granularity = self.input_granularity
        if granularity is None and self.input_format == "fp8_block":
            granularity = 128  # squares of a weight go with groups of a token, as in DeepSeek-V3
        super().__post_init__()
        fmt, block, scale = self._chosen("input_", granularity, self.input_scale, "token")
        self._set(input_format=fmt, input_granularity=block, input_scale=scale)
        self._set(_input=self._cast(fmt, block, scale))

    @property
    def input(self) -> Cast | None:
        return self._input


@dataclass(frozen=True)
class Static(Config):
    """The weight is stored in few bits. The input is cast under one scale for the tensor, which
    calibration data chose (FP8-BERT, arXiv 2312.05725).

    A call measures nothing. `quantize_(model, Static(...), calibration=batches)` runs the batches
    through the model before it converts the weights.
    """

    granularity: Granularity | None = "tensor"
    input_format: FormatLike | None = None
    """Format of inputs; defaults to the format of the weight."""
    observer: str = "amax"
    """How the calibration data choose the scale of inputs. "amax" lets their amax fill the format.
    "percentile" takes a quantile of the magnitudes in place of amax, and the rest saturates.
    "least_error" takes the power of two with the least squared error."""
    percentile: float = 99.99
    """The quantile of "percentile", in percent."""

    _input: Cast = field(init=False, repr=False, compare=False)

    name: ClassVar[str] = "static"
    static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.input_format is None:
            self._set(input_format=self.format)
        super().__post_init__()
        if self.observer not in OBSERVERS:
            raise self._error("observer", f"one of {', '.join(map(repr, OBSERVERS))}")
        if not isinstance(self.percentile, (int, float)) or not 0 < self.percentile <= 100:
            raise self._error("percentile", "a number above 0 and at most 100")
        given = self.input_format
        if isinstance(given, str) and given.lower() in SCHEMES:
            raise self._error(
                "input_format",
                "a format with one scale for the tensor: blocks of inputs have "
                "scales that each call measures, as in Dynamic",
            )
        fmt, block, scale = self._chosen("input_", "tensor", "amax", "tensor")
        self._set(input_format=fmt, _input=self._cast(fmt, block, scale))

    @property
    def input(self) -> Cast | None:
        return self._input


#: Fields that stand in files even with their defaults, since a scheme may have set them.
_SPELLED = ("format", "granularity", "scale", "input_format", "input_granularity", "input_scale")

#: Name in files -> class.
CONFIGS: dict[str, type[Config]] = {c.name: c for c in (WeightOnly, Dynamic, Static)}

for _kind in CONFIGS.values():
    # torch.compile takes a config as a constant.
    register_constant(_kind)


def config_from(written: str | Mapping[str, Any]) -> Config:
    """The config that `to_json` wrote.

    Raises:
        QuantizationError: no config has that name, or a field is not allowed.
    """
    values = dict(json.loads(written) if isinstance(written, str) else written)
    kind = CONFIGS.get(values.pop("config", ""))
    if kind is None:
        raise QuantizationError(
            f'a config has a "config" out of {", ".join(CONFIGS)}; got {written!r}'
        )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise QuantizationError(f"{kind.__name__}: {error}") from error


# --- configs by name -------------------------------------------------------------------------

Plan = Config | Mapping[str, Config | None]
"""One config for all weights, or configs by pattern of module names. The first pattern that matches
decides. None, or no match, leaves a module as it is."""


def plan_of(given: Any) -> list[tuple[str, Config | None]]:
    """Patterns and configs, in order.

    Raises:
        QuantizationError: `given` is neither a config nor a mapping of patterns to configs.
    """
    if isinstance(given, Config):
        return [("*", given)]
    if isinstance(given, type) and issubclass(given, Config):
        raise QuantizationError(
            f"a config is an instance; got the class {given.__name__}: {given.__name__}()"
        )
    if not isinstance(given, Mapping) or not given:
        raise QuantizationError(
            "quantize_ takes WeightOnly(...), Dynamic(...) or Static(...), or a mapping from "
            f"patterns of module names to them; got {given!r}"
        )
    for pattern, config in given.items():
        if not isinstance(pattern, str) or not (config is None or isinstance(config, Config)):
            raise QuantizationError(
                "a mapping has patterns of module names, and configs or None; got "
                f"{pattern!r}: {config!r}"
            )
    return list(given.items())


def config_for(plan: list[tuple[str, Config | None]], fqn: str) -> Config | None:
    """The config of the module with this name."""
    for pattern, config in plan:
        if fnmatch.fnmatchcase(fqn, pattern):
            return config
    return None
