"""The recording of a tracked model, as a graph, as a table and as data."""

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


#: The heads of the columns of the table.
_HEADS = ("mean|x|", "std", "RMS", "max|x|", "RMS(q)", "sat.", "underfl.")


def label(node: fx.Node) -> str:
    """The name of a node behind its module's name, such as `layers.0.fc1: linear`. A parameter has
    its own name."""
    if node.op == "get_attr":
        return str(node.target)
    name, module = str(node.meta["clean_name"]), node.meta["module"]
    return f"{module}: {name}" if module else name


def table(graph: fx.Graph, forward: Format, backward: Format) -> str:
    """A line for each node of `graph` that has numbers, in order."""
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
        forward: format whose losses are counted in values: a `Format`, its name or its torch dtype.
        backward: format whose losses are counted in gradients.

    It records while `tracking(model)` is open or a `track_scales(model)` runs. The numbers of a
    gradient arrive when a backward pass reaches it. If there are several passes, the last one
    counts. Copies and pickles are empty, since a recording belongs to one call.
    """

    def __init__(self, forward: FormatLike = E4M3FN, backward: FormatLike = E5M2) -> None:
        self.forward, self.backward = get_format(forward), get_format(backward)
        self._recorder: Recorder | None = None
        self._ran: set[int] = set()

    # --- recording ---------------------------------------------------------------------------

    def begin(self, model: nn.Module | None) -> Recorder:
        """Begin a new recording in place of the last one."""
        self.close()
        self._ran.clear()
        self._recorder = Recorder(model, self.forward, self.backward)
        return self._recorder

    def close(self) -> None:
        """Remove the hooks that read gradients. The recording stays."""
        if self._recorder is not None:
            self._recorder.close()

    def backend(self, module: fx.GraphModule, inputs: Any) -> Any:
        """A backend of torch.compile: `torch.compile(model, backend=scales.backend)`.

        It runs the captured graphs operator by operator, and records all of them as one call. A
        graph that runs a second time begins a new recording.
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

        Placeholders are inputs. `get_attr` nodes are parameters, buffers and tensors from
        elsewhere. All other nodes are operators, in the order in which they ran. `node.meta` has
        `metrics` (a `Metrics`, if the tensor holds floats), `clean_name`, `outputs_float_tensor`,
        `requires_grad` (for parameters), `module`, `source` (`file:line`), `shape` and `dtype`.

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
        """The last arguments of each module, as pairs of a name and a node."""
        return {} if self._recorder is None else self._recorder.given

    def __str__(self) -> str:
        return "nothing recorded" if self._recorder is None else self.table()

    def table(self) -> str:
        """Return the table: a line for each tensor of floats, with its gradient at the right.

        Raises:
            ModelError: nothing was recorded yet.
        """
        return table(self.scales_graph(), self.forward, self.backward)

    def to_dict(self) -> dict[str, Any]:
        """Return the recording in built-in types, for JSON: the formats, and a list of tensors.

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
        """Return the recording as comma-separated values: a row for each tensor and direction.

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
