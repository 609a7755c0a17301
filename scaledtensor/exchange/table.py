"""FORMATS: the families of checkpoints that `exchange` reads and writes, as data."""

from collections.abc import Iterator
from dataclasses import dataclass

from scaledtensor.errors import UnsupportedError
from scaledtensor.exchange import compressed_tensors, fine_grained, gguf, modelopt, torchao
from scaledtensor.exchange.layouts import Layout
from scaledtensor.quantization.configs import Config

__all__ = ["FORMATS", "Family", "family_of", "layout_for", "rows"]


@dataclass(frozen=True)
class Family:
    """Checkpoints of one library.

    Attributes:
        name: the name that `exchange.save` takes.
        library: the library that defines the files.
        checked: the package, with its version, that the tests compare decoded values with.
        method: the `quant_method` of config.json; for GGUF the ending of the file.
        layouts: how each kind of weight is written.
    """

    name: str
    library: str
    checked: str
    method: str
    layouts: tuple[Layout, ...]


#: Name of a family -> what it holds.
FORMATS: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "compressed-tensors",
            "compressed-tensors (LLM Compressor)",
            "compressed-tensors 0.20.0",
            compressed_tensors.METHOD,
            compressed_tensors.LAYOUTS,
        ),
        Family(
            "fine-grained-fp8",
            "DeepSeek-V3's fine-grained FP8",
            "transformers 5.23.0",
            fine_grained.METHOD,
            fine_grained.LAYOUTS,
        ),
        Family(
            "modelopt",
            "NVIDIA ModelOpt",
            "nvidia-modelopt 0.47.0",
            modelopt.METHOD,
            modelopt.LAYOUTS,
        ),
        Family("torchao", "torchao", "torchao 0.18.0", torchao.METHOD, torchao.LAYOUTS),
        Family("gguf", "GGUF (llama.cpp)", "gguf 0.19.0", gguf.METHOD, gguf.LAYOUTS),
    )
}


def family_of(name: str) -> Family:
    """The family of that name.

    Raises:
        UnsupportedError: there is none.
    """
    if name not in FORMATS:
        raise UnsupportedError(f"no format {name!r} is known; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def layout_for(family: Family, config: Config, where: str) -> Layout:
    """The layout of a family for weights of `config`; `where` names the weight in messages.

    Raises:
        UnsupportedError: the family has none.
    """
    for layout in family.layouts:
        if layout.fits(config):
            return layout
    others = [f.name for f in FORMATS.values() if any(a.fits(config) for a in f.layouts)]
    also = f". {' and '.join(others)} can hold it" if others else ""
    known = "; ".join(f"{a.name}: {a.config}" for a in family.layouts)
    raise UnsupportedError(
        f"{where} is {config}, for which {family.library} has no layout{also}. Its layouts are "
        f"{known}"
    )


def rows() -> Iterator[tuple[Family, Layout]]:
    """All layouts, each with its family."""
    for family in FORMATS.values():
        for layout in family.layouts:
            yield family, layout
