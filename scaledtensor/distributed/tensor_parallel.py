"""Tensor parallelism for linears of ScaledTensors: styles for torch's `parallelize_module`.

The styles have the names and arguments of the styles in `torch.distributed.tensor.parallel`, and
are for modules after `scale_model`. Parameters become DTensors as there, so `fully_shard`,
optimizers and checkpoints work as usual. The forward pass differs, because a DTensor knows nothing
of recipes. Products run on local ScaledTensors, and cast them as on one device. If a product would
cast a tensor after it arrives, the tensor is cast before it is sent: activations are gathered in
one byte per element. Results that ranks sum are sent by value in the activation format.

The algorithms are by Shoeybi et al., arXiv 1909.08053, and Korthikanti et al., arXiv 2205.05198.
"""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from scaledtensor.errors import ModelError, UnsupportedError
from scaledtensor.ops.products.table import cast_input
from scaledtensor.recipes import Delayed
from scaledtensor.tensors import verbs
from scaledtensor.tensors.shards import is_sharded, part_of
from scaledtensor.tensors.tensor import ScaledTensor

__all__ = ["ColwiseParallel", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"]


class _LocalForward(ParallelStyle):
    """A style with a forward pass over local tensors."""

    classes: tuple[type[nn.Module], ...]
    use_local_output: bool

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check(module, device_mesh)
        for name, p in list(module.named_parameters(recurse=False)):
            spread = _spread(p, device_mesh, self.placement(name))
            setattr(module, name, nn.Parameter(spread, p.requires_grad))
        module.forward = partial(self.forward, module, device_mesh)
        return module

    def placement(self, name: str) -> Placement:
        """Return the placement of the parameter `name`."""
        raise NotImplementedError

    def forward(self, module: nn.Module, mesh: DeviceMesh, x: Any) -> Any:
        """Return the module's result for `x`, in the wanted layout."""
        raise NotImplementedError

    def _check(self, module: nn.Module, mesh: DeviceMesh) -> None:
        style = type(self).__name__
        if any(isinstance(getattr(p, "recipe", None), Delayed) for p in module.parameters()):
            raise UnsupportedError(
                f"{style} with a recipe by history: parts of a weight have no history of their "
                "own. Take Unit() or Current(), which need none"
            )
        names = " or ".join(f"nn.{c.__name__}" for c in self.classes)
        if not isinstance(module, self.classes) or "forward" in module.__dict__:
            raise ModelError(
                f"{style} is for {names} with a forward of its class; got {type(module).__name__}"
            )
        if mesh.ndim != 1:
            raise ModelError(f"{style} is along one dimension of a mesh; got one of {mesh.ndim}")
        for name, p in module.named_parameters(recurse=False):
            if not isinstance(p, ScaledTensor):
                raise ModelError(
                    f"{style} is for ScaledTensors, and {name} is a {type(p).__name__}: call "
                    "scale_model() before parallelize_module(), or take the style of that name in "
                    "torch.distributed.tensor.parallel"
                )
            cut = self.placement(name)
            if isinstance(cut, Shard) and p.shape[cut.dim] % mesh.size():
                raise ModelError(
                    f"{style} cuts dimension {cut.dim} of {name}, of {tuple(p.shape)}, which "
                    f"{mesh.size()} ranks do not divide"
                )

    def out(self, y: Any, mesh: DeviceMesh, layout: Placement, wanted: Placement) -> Any:
        """Return a local result in another layout."""
        layout, wanted = _counted(layout, y), _counted(wanted, y)
        spread = DTensor.from_local(y, mesh, [layout], run_check=False)
        if wanted != layout:
            spread = spread.redistribute(placements=[wanted])
        return spread.to_local() if self.use_local_output else spread


class _Linear(_LocalForward):
    """A style for a linear."""

    classes = (nn.Linear,)
    usual: tuple[Placement, Placement]
    """The default layouts of the input and of the result."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or self.usual[0]
        self.output_layouts = output_layouts or self.usual[1]
        self.use_local_output = use_local_output


class ColwiseParallel(_Linear):
    """A linear whose output features are divided among ranks: `weight` and `bias` are `Shard(0)`.

    Args:
        input_layouts: the layout of the input, by default `Replicate()`. An input in another layout
            is cast by the recipe of the weight and then gathered.
        output_layouts: the layout of the result, by default `Shard(-1)`: each rank has its
            features.
        use_local_output: whether the result is a local tensor, and not a DTensor.

    Raises:
        ModelError: on use, the module is no linear of ScaledTensors, or ranks do not divide it.
        UnsupportedError: on use, the recipe keeps histories.
    """

    usual = (Replicate(), Shard(-1))

    def placement(self, name: str) -> Placement:
        return Shard(0)

    def forward(self, module: nn.Module, mesh: DeviceMesh, x: Any) -> Any:
        weight, bias = _local(module.weight), _local(module.bias)
        x = _moved(x, mesh, self.input_layouts, Replicate(), weight, Partial())
        y = F.linear(x, weight, bias)
        return self.out(y, mesh, Shard(-1), self.output_layouts)


class RowwiseParallel(_Linear):
    """A linear whose input features are divided among ranks, which sum their results.

    `weight` is `Shard(1)`. `bias` is whole on each rank, and added to the sum.

    Args:
        input_layouts: the layout of the input, by default `Shard(-1)`, the default result of
            `ColwiseParallel`.
        output_layouts: the layout of the result, by default `Replicate()`; `Shard(1)` leaves each
            rank its part of a sequence.
        use_local_output: whether the result is a local tensor, and not a DTensor.

    Raises:
        ModelError: on use, the module is no linear of ScaledTensors, or ranks do not divide it.
        UnsupportedError: on use, the recipe keeps histories.
    """

    usual = (Shard(-1), Replicate())

    def placement(self, name: str) -> Placement:
        return Shard(1) if name == "weight" else Replicate()

    def forward(self, module: nn.Module, mesh: DeviceMesh, x: Any) -> Any:
        weight = _local(module.weight)
        x = _moved(x, mesh, self.input_layouts, Shard(-1), weight, None)
        terms = DTensor.from_local(F.linear(x, weight), mesh, [Partial()], run_check=False)
        y = terms.redistribute(placements=[_counted(self.output_layouts, terms)]).to_local()
        if module.bias is not None:
            # A rank with a part of the sequence has a part of the bias's gradient.
            part = Replicate() if self.output_layouts.is_replicate() else Partial()
            y = y + _local(module.bias, part)
        return self.out(y, mesh, self.output_layouts, self.output_layouts)


class SequenceParallel(_LocalForward):
    """A norm that computes a part of the sequence on each rank. Its gains are whole on each rank.

    Args:
        sequence_dim: the divided dimension, for a result that is a DTensor.
        use_local_output: whether the result is a local tensor, and not a DTensor.

    Raises:
        ModelError: on use, the module is no norm of ScaledTensors.
    """

    classes = (nn.LayerNorm, nn.RMSNorm)

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def placement(self, name: str) -> Placement:
        return Replicate()

    def forward(self, module: Any, mesh: DeviceMesh, x: Any) -> Any:
        weight = _local(module.weight, Partial())
        if isinstance(module, nn.RMSNorm):
            y = F.rms_norm(x, module.normalized_shape, weight, module.eps)
        else:
            bias = _local(module.bias, Partial())
            y = F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
        cut = Shard(self.sequence_dim)
        return self.out(y, mesh, cut, cut)


class PrepareModuleInput(ParallelStyle):
    """Converts the inputs of a module to another layout.

    An input that several linears of the module read is cast by their recipe, and gathered once.

    Args:
        input_layouts: the layout of each positional input; None leaves an input unchanged.
        desired_input_layouts: the layouts to convert to.
        linear: the name of a linear in the module whose recipe casts the inputs; by default the
            first linear of ScaledTensors.

    Raises:
        ModelError: the layouts have different lengths; or, on use, the module has no such linear.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...],
        desired_input_layouts: Placement | tuple[Placement | None, ...],
        linear: str | None = None,
    ) -> None:
        super().__init__()
        self.have, self.want = (
            (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
            for layouts in (input_layouts, desired_input_layouts)
        )
        self.linear = linear
        if len(self.have) != len(self.want):
            raise ModelError(
                f"PrepareModuleInput takes a desired layout for each layout; got {len(self.have)} "
                f"and {len(self.want)}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = self._weight(module)

        def prepare(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            if len(inputs) != len(self.have):
                raise ModelError(
                    f"PrepareModuleInput has layouts for {len(self.have)} inputs of "
                    f"{type(module).__name__}, which was called with {len(inputs)}"
                )
            return tuple(
                x
                if have is None or want is None or have == want
                else _moved(x, device_mesh, have, want, part_of(weight()), None)
                for x, have, want in zip(inputs, self.have, self.want, strict=True)
            )

        module.register_forward_pre_hook(prepare)
        return module

    def _weight(self, module: nn.Module) -> Any:
        """Return a function that gives the weight whose recipe casts.

        It is a function because `fully_shard` replaces the parameter later.
        """
        for name, child in module.named_modules():
            p = getattr(child, "weight", None)
            scaled = isinstance(p, ScaledTensor) or is_sharded(p)
            if isinstance(child, nn.Linear) and scaled and self.linear in (None, name):
                return lambda: child.weight
        wanted = "a linear" if self.linear is None else f"a linear {self.linear!r}"
        raise ModelError(
            f"PrepareModuleInput casts by the recipe of {wanted} of ScaledTensors, and "
            f"{type(module).__name__} has none: call scale_model() first"
        )


def _spread(p: Any, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return a parameter as a DTensor with the values of the first rank."""
    whole = p.detach().clone()
    group = mesh.get_group()
    dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
    part = whole
    if isinstance(placement, Shard):
        part = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].clone()
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=p.shape, stride=p.stride()
    )


def _local(p: Any, gradient: Placement | None = None) -> Any:
    """Return this rank's part of a parameter. `gradient` is the layout of its gradient."""
    if p is None:
        return None
    return p.to_local(grad_placements=None if gradient is None else [gradient])


def _moved(
    x: Any,
    mesh: DeviceMesh,
    have: Placement,
    want: Placement,
    weight: ScaledTensor,
    gradient: Placement | None,
) -> Any:
    """Return an input of products with `weight` in another layout.

    If the input is sent, it is cast first, by the cast of these products.
    """
    if isinstance(x, DTensor):
        have, x = x.placements[0], x.to_local()
    have, want = _counted(have, x), _counted(want, x)
    if not isinstance(x, ScaledTensor):
        x = verbs.promote(x, weight.detach())
    if have != want and not have.is_replicate():
        x = cast_input(x, weight.recipe)
    spread = DTensor.from_local(x, mesh, [have], run_check=False)
    if have != want:
        spread = spread.redistribute(placements=[want])
    return spread.to_local(grad_placements=[want if gradient is None else gradient])


def _counted(layout: Placement, x: Tensor) -> Placement:
    """Return a layout with its dimension counted from the front, as parts of torch require it."""
    return Shard(layout.dim % x.dim()) if isinstance(layout, Shard) else layout
