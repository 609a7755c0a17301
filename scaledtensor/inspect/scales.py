"""What a tracked model is asked for: its scales, as a graph, as a table and as data."""

import csv
import io
from typing import Any

import torch
from torch import fx, nn

from scaledtensor.errors import ModelError
from scaledtensor.formats import E4M3FN, E5M2, Format, FormatLike
from scaledtensor.formats import get as get_format
from scaledtensor.inspect.metrics import Data, Metrics
from scaledtensor.inspect.recorder import Recorder, interpreter

__all__ = ["Scales", "label", "table"]


# The table of a recording: one line for each tensor of floats.
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


class Scales:
    """The numbers of every tensor in the last call of a model, and of its gradient.

    Args:
        forward: the format whose losses are counted in values; a `Format`, its name or its
            torch dtype.
        backward: that of gradients.

    It records while `tracking(model)` is open or a `track_scales(model)` runs. Numbers of
    gradients come in as a backward pass reaches them, the last one's if there are several. Copies
    and pickles of it are empty: a recording belongs to the call that it was made of.
    """

    def __init__(self, forward: FormatLike = E4M3FN, backward: FormatLike = E5M2) -> None:
        self.forward, self.backward = get_format(forward), get_format(backward)
        self._recorder: Recorder | None = None
        self._ran: set[int] = set()

    # --- recording ---------------------------------------------------------------------------

    def begin(self, model: nn.Module | None) -> Recorder:
        """A new recording in the place of the last one."""
        self.close()
        self._ran.clear()
        self._recorder = Recorder(model, self.forward, self.backward)
        return self._recorder

    def close(self) -> None:
        """Stop listening to gradients; what was recorded stays."""
        if self._recorder is not None:
            self._recorder.close()

    def backend(self, module: fx.GraphModule, inputs: Any) -> Any:
        """A backend of torch.compile: `torch.compile(model, backend=scales.backend)`.

        It runs what Dynamo captured operator by operator and records it, over all graphs where
        Dynamo made several. A graph that runs a second time begins a new recording.
        """
        index = id(module)

        def recorder() -> Recorder:
            current = self._recorder
            if current is None or (index in self._ran and not current.in_call):
                current = self.begin(None)
            self._ran.add(index)
            return current

        return interpreter(module, recorder)

    # --- what was recorded -------------------------------------------------------------------

    def scales_graph(self) -> fx.Graph:
        """The graph of the last call.

        Placeholders are inputs, `get_attr` nodes parameters, buffers and tensors from elsewhere,
        and the rest operators in the order in which they ran. `node.meta` has `metrics` (a
        `Metrics`, where the tensor holds floats), `clean_name`, `outputs_float_tensor`,
        `requires_grad` (of a parameter), `module`, `source` (`file:line`), `shape` and `dtype`.

        Raises:
            ModelError: nothing was recorded yet.
        """
        if self._recorder is None:
            raise ModelError(
                "nothing was recorded yet: call the tracked model first, and backward() of its "
                "result for the numbers of gradients"
            )
        return self._recorder.graph

    @property
    def given(self) -> dict[str, list[tuple[str, fx.Node]]]:
        """What each module was given last: pairs of an argument's name and its node."""
        return {} if self._recorder is None else self._recorder.given

    def __str__(self) -> str:
        return "nothing recorded" if self._recorder is None else self.table()

    def table(self) -> str:
        """One line for each tensor of floats: forward, then its gradient.

        Raises:
            ModelError: nothing was recorded yet.
        """
        return table(self.scales_graph(), self.forward, self.backward)

    def to_dict(self) -> dict[str, Any]:
        """The same as built-in types that JSON takes: the formats, and a list of tensors.

        Raises:
            ModelError: nothing was recorded yet.
        """
        nodes = [n for n in self.scales_graph().nodes if "metrics" in n.meta]
        return {
            "forward_format": self.forward.name,
            "backward_format": self.backward.name,
            "tensors": [_entry(n) for n in nodes],
        }

    def to_csv(self) -> str:
        """The same as comma-separated values: a row for each tensor and direction.

        Raises:
            ModelError: nothing was recorded yet.
        """
        out = io.StringIO()
        names = Metrics.names()
        heads = ["name", "module", "operator", "source", "shape", "dtype", "direction", "scale"]
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*heads, *names, *(f"qdata_{n}" for n in names)])
        for entry in self.to_dict()["tensors"]:
            shape = "x".join(map(str, entry["shape"]))
            told = [entry[k] for k in ("name", "module", "operator", "source")]
            for direction in ("forward", "backward"):
                data = entry[direction]
                if data is None:
                    continue
                held = data.get("qdata", {})
                writer.writerow(
                    [*told, shape, entry["dtype"], direction, data.get("scale", "")]
                    + [data[n] for n in names]
                    + [held.get(n, "") for n in names]
                )
        return out.getvalue()

    def __reduce__(self) -> tuple[Any, ...]:
        return Scales, (self.forward, self.backward)


def _entry(node: fx.Node) -> dict[str, Any]:
    def numbers(data: Data | None) -> dict[str, Any] | None:
        return None if data is None else data.to_dict()

    meta, metrics = node.meta, node.meta["metrics"]
    kinds = {"placeholder": "input", "get_attr": "parameter" if meta["requires_grad"] else "tensor"}
    return {
        "name": meta["clean_name"],
        "module": meta["module"],
        "operator": kinds.get(node.op) or spelled(node.target),
        "source": meta["source"],
        "inputs": [n.meta["clean_name"] for n in node.all_input_nodes],
        "shape": list(meta["shape"]),
        "dtype": str(meta["dtype"]).removeprefix("torch."),
        "forward": numbers(metrics.fwd),
        "backward": numbers(metrics.bwd),
    }


def spelled(target: Any) -> str:
    """An operator's name, as a user would write it."""
    if isinstance(target, str):
        return target
    return str(torch.overrides.resolve_name(target) or getattr(target, "__name__", target))
