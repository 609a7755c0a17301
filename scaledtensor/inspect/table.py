"""The table of a recording: one line for each tensor of floats."""

from torch import fx

from scaledtensor.formats import Format
from scaledtensor.inspect.metrics import Data

__all__ = ["label", "table"]

_HEADS = ("mean|x|", "std", "RMS", "max|x|", "RMS(q)", "sat.", "underfl.")


def label(node: fx.Node) -> str:
    """A node's name behind that of its module, `layers.0.fc1: linear`; a parameter's own."""
    if node.op == "get_attr":
        return str(node.target)
    name, module = str(node.meta["clean_name"]), node.meta["module"]
    return f"{module}: {name}" if module else name


def table(graph: fx.Graph, forward: Format, backward: Format) -> str:
    """The nodes of `graph` that have numbers, in order; the last columns are shares in percent."""
    rows: list[tuple[str, ...]] = [("tensor", "shape", *_HEADS, *_HEADS)]
    broken = []
    for node in graph.nodes:
        if "metrics" not in node.meta:
            continue
        metrics = node.meta["metrics"]
        shape = "x".join(map(str, node.meta["shape"])) or "1"
        rows.append((label(node), shape, *_cells(metrics.fwd), *_cells(metrics.bwd)))
        for data, what in ((metrics.fwd, ""), (metrics.bwd, "gradient of ")):
            if data is not None and (data.nans or data.infs):
                broken.append(f"{what}{label(node)}: {data.nans} NaN, {data.infs} infinite")
    empty = {i for i in range(2, len(rows[0])) if not any(row[i] for row in rows[1:])}
    kept = [[cell for i, cell in enumerate(row) if i not in empty] for row in rows]
    first = 2 + sum(i not in empty for i in range(2, 2 + len(_HEADS)))
    widths = [max(len(row[i]) for row in kept) for i in range(len(kept[0]))]

    def line(cells: list[str]) -> str:
        aligned = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        left, right = "  ".join(aligned[:first]), "  ".join(aligned[first:])
        return f"{left}  | {right}".rstrip(" |")

    head = f"{len(rows) - 1} tensors; left the values (losses in {forward!r}), "
    head += f"right their gradients (losses in {backward!r})"
    return "\n".join([head, "", *map(line, kept), *broken])


def _cells(data: Data | None) -> tuple[str, ...]:
    if data is None:
        return ("",) * len(_HEADS)
    held = data.held
    return (
        *(f"{x:.3g}" for x in (data.mean_abs, data.std, data.rms, data.abs_max)),
        "" if data.qdata is None else f"{data.qdata.rms:.3g}",
        *(f"{share:.2%}" if share else "0" for share in (held.saturated, held.underflowed)),
    )
