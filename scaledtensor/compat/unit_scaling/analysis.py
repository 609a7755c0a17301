"""`unit_scaling.analysis`: the scales of a tracked model as a plot and as a data frame."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, fx, nn

from scaledtensor import inspect
from scaledtensor.compat.unit_scaling.transforms import track_scales
from scaledtensor.errors import ModelError, UnsupportedError
from scaledtensor.inspect import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["example_batch", "graph_to_dataframe", "plot", "visualiser"]


def plot(
    g: fx.Graph,
    title: str = "",
    metric: str = "mean_abs",
    prune_same_scale: bool = True,
    show_arrows: bool = True,
    show_error_bars: bool = True,
    show_zero_tensors: bool = False,
    xmin: float | None = None,
    xmax: float | None = None,
) -> "Axes":
    """Draw a scales graph with `scaledtensor.inspect.plot`, and return the axes.

    `axes.figure.savefig(path)` writes the plot. It shows the limits of E4M3FN and E5M2.

    Args:
        g: the result of `scales_graph()` of a model from `track_scales`.
        metric: a name in `Metrics.names()`, or its full name.
        show_zero_tensors: has no effect. A scale of zero is a hollow dot at the left edge.

    Raises:
        UnsupportedError: matplotlib is missing.
        ModelError: `g` has no scales, or `metric` is unknown.
    """
    short = dict(zip(Metrics.full_names(), Metrics.names(), strict=True))
    figure = inspect.plot(
        g,
        title=title,
        metric=short.get(metric, metric),
        prune_same_scale=prune_same_scale,
        show_arrows=show_arrows,
        show_error_bars=show_error_bars,
        xmin=xmin,
        xmax=xmax,
    )
    return figure.axes[0]


def graph_to_dataframe(g: fx.Graph) -> Any:
    """Return a pandas data frame with a row for each float tensor in a scales graph, and a row for
    its gradient.

    The columns are "layer", "weight tensor", "direction" ("fwd" or "bwd"), "tensor type" (x, w,
    grad_x, grad_w) and the names in `Metrics.full_names()`. A tensor without a gradient has no
    numbers in the gradient's row.

    Raises:
        UnsupportedError: pandas is missing.
        ModelError: `g` has no scales.
    """
    if find_spec("pandas") is None:
        raise UnsupportedError(
            "graph_to_dataframe() needs pandas: pip install pandas; Scales.to_csv() and to_dict() "
            "of a tracked model's `scales` have the same numbers without it"
        )
    pandas: Any = import_module("pandas")  # an extra, without types
    heads = ["layer", "weight tensor", "direction", "tensor type", *Metrics.full_names()]
    return pandas.DataFrame(_rows(g), columns=heads)


def _rows(g: fx.Graph) -> list[list[Any]]:
    if any("clean_name" not in n.meta for n in g.nodes):
        raise ModelError("this graph has no scales: take it from scales_graph() of a tracked model")
    rows = []
    for n in g.nodes:
        if n.op == "output" or "metrics" not in n.meta:
            continue
        weight = n.meta["requires_grad"]
        for direction, data, prefix in (
            ("fwd", n.meta["metrics"].fwd, ""),
            ("bwd", n.meta["metrics"].bwd, "grad_"),
        ):
            kind = prefix + ("w" if weight else "x")
            numbers = [getattr(data, name, None) for name in Metrics.names()]
            rows.append([n.meta["clean_name"], weight, direction, kind, *numbers])
    return rows


def visualiser(
    model: nn.Module,
    tokenizer: Any = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    backward: bool = True,
    dataset_path: str = "wikitext",
    dataset_name: str = "wikitext-103-v1",
    *,
    batch: tuple[Tensor, Tensor] | None = None,
    **plot_kwargs: Any,
) -> "Axes":
    """Track the scales of a copy of `model` on one batch, and draw them.

        visualiser(model, batch=(inputs, labels))

    Args:
        model: called as `_, loss = model(inputs, labels)`.
        backward: whether gradients are drawn.
        batch: the inputs and the labels.
        tokenizer, batch_size, seq_len, dataset_path, dataset_name: have no effect. The published
            library downloads a batch with them.
        plot_kwargs: arguments of `plot`.

    Raises:
        UnsupportedError: `batch` is not given, or matplotlib is missing.
    """
    if batch is None:
        _no_download("visualiser()", "pass batch=(inputs, labels)")
    tracked = track_scales(model)
    _, loss = tracked(*batch)
    if backward:
        loss.backward()
    return plot(tracked.scales_graph(), **plot_kwargs)


def example_batch(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise an error. The published library downloads a data set here.

    Raises:
        UnsupportedError: always.
    """
    _no_download("example_batch()", "tokenize a text of your own")


def _no_download(what: str, instead: str) -> NoReturn:
    raise UnsupportedError(
        f"{what} of the published library takes its batch from a data set in the network, which "
        f"scaledtensor does not use: {instead}"
    )
