"""Some ranks save checkpoints, and other numbers of ranks load them."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensors import bits, gaussian, value_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import whole

import scaledtensor as sct
from scaledtensor import checkpoint
from scaledtensor.checkpoint.shards import local, of_local
from scaledtensor.errors import CheckpointError
from scaledtensor.tensors.tensor import ScaledTensor

RECIPES = {
    "plain": None,
    "unit": sct.recipes.Unit(),
    "bf16": sct.recipes.Unit(master="bf16"),
    "stored": sct.recipes.Current(store_frozen=True),
}
KINDS = list(RECIPES)


class Net(nn.Module):
    """A model with rows that no number of ranks divides, fewer rows than ranks, a tied and a frozen
    weight."""

    def __init__(self, seed):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(6, 11)
        self.frozen = nn.Linear(11, 6, bias=False).requires_grad_(False)
        self.last = nn.Linear(11, 6)
        self.narrow = nn.Parameter(torch.empty(1, 4))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        for i, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=g) * 3.0**i
        self.seen.copy_(torch.randint(0, 9, (3,), generator=g))
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).relu()) + self.frozen(self.tied(x))


def made(kind, seed=0):
    model = Net(seed)
    return model if RECIPES[kind] is None else sct.scale_model(model, RECIPES[kind])


def moments(model, seed):
    """An AdamW after some steps, with states of the same kind as its parameters."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.5},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
    )
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        values = torch.randn(2, *p.shape, generator=g) * 1e-3
        if p.requires_grad:
            first, second = torch.zeros_like(p), torch.zeros_like(p)
            with torch.no_grad():
                first.copy_(values[0]), second.copy_(values[1].square())
            step = torch.tensor(float(seed))
            optimizer.state[p] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return optimizer


def cut(x, mesh, dim=0):
    """Return this rank's shard of `x`, cut as `fully_shard` cuts."""
    if not isinstance(x, torch.Tensor) or x.dim() <= dim:
        return x
    all_of_it = x.detach()
    q = all_of_it.qdata if isinstance(all_of_it, ScaledTensor) else all_of_it
    chunks = q.chunk(mesh.size(), dim)
    own = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else None
    own = q.narrow(dim, 0, 0) if own is None else own
    if isinstance(all_of_it, ScaledTensor):
        own = all_of_it.like(own.clone(), all_of_it.scale.clone(), all_of_it.rms.clone())
    return DTensor.from_local(
        own.clone(), mesh, [Shard(dim)], run_check=False, shape=x.shape, stride=x.stride()
    )


def sharded(model, optimizer=None, dim=0):
    """Return the model and the optimizer cut over all ranks, or whole on one process."""
    if not dist.is_initialized():
        return model, optimizer
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    swapped = {}
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                new = swapped.setdefault(p, nn.Parameter(cut(p, mesh, dim), p.requires_grad))
                setattr(module, name, new)
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [swapped[p] for p in group["params"]]
        for p in list(optimizer.state):
            old = optimizer.state.pop(p)
            optimizer.state[swapped[p]] = {key: cut(x, mesh, dim) for key, x in old.items()}
    return model, optimizer


def contents(model, optimizer=None):
    found = {name: bits(x) for name, x in model.state_dict(keep_vars=True).items()}
    if optimizer is not None:
        names = {p: name for name, p in model.named_parameters()}
        for p, state in optimizer.state.items():
            found |= {f"{names[p]} {key}": bits(x) for key, x in state.items()}
        found["groups"] = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
    return found


def different(found, expected):
    """Return the names under which two `contents` differ."""
    return [n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n)]


def saves(folder, kind, seed, dim=0):
    model = made(kind, seed)
    model, optimizer = sharded(model, moments(model, seed), dim)
    rank = dist.get_rank() if dist.is_initialized() else 0
    checkpoint.save(
        folder, model, optimizer, extra={"step": seed, "lrs": (0.5, 1e-3)}, per_rank=[rank] * 3
    )


def loads(folder, kind, seed, dim=0):
    """Return the names that differ from the saved ones, and the extra data."""
    model = made(kind, 100)
    model, optimizer = sharded(model, moments(model, 100), dim)
    ids = [id(p) for p in model.parameters()]
    loaded = checkpoint.load(folder, model, optimizer)
    assert ids == [id(p) for p in model.parameters()]
    expected = made(kind, seed)
    expected = sharded(expected, moments(expected, seed), dim)
    return different(contents(model, optimizer), contents(*expected)), loaded


def passes_on(source, target, kind, seed):
    """Load a checkpoint of other ranks on these ranks, and save it again for others."""
    model = made(kind, 100)
    model, optimizer = sharded(model, torch.optim.AdamW(groups_like(model)))
    loaded = checkpoint.load(source, model, optimizer)
    checkpoint.save(target, model, optimizer, extra=loaded.extra, per_rank=loaded.per_rank[0])


def groups_like(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


@pytest.mark.parametrize("kind", KINDS)
def test__four_ranks_to_one_to_two__is_bit_for_bit(kind, world, tmp_path):
    four, one, two = (str(tmp_path / n) for n in ("four", "one", "two"))
    world(4, saves, four, kind, 7)
    wrong, loaded = loads(four, kind, 7)
    assert wrong == []
    assert loaded.extra == {"step": 7, "lrs": (0.5, 1e-3)}
    assert loaded.per_rank == [[rank] * 3 for rank in range(4)]
    passes_on(four, one, kind, 7)
    assert [wrong for wrong, _ in world(2, loads, one, kind, 7)] == [[], []]
    world(2, passes_on, one, two, kind, 7)
    assert [wrong for wrong, _ in world(4, loads, two, kind, 7)] == [[]] * 4
    assert loads(two, kind, 7)[0] == []


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("plain", "unit"),
        ("unit", "plain"),
        ("plain", "stored"),
        ("unit", "stored"),
        ("unit", "bf16"),
    ],
)
def test__another_kind_on_the_other_side__is_what_that_side_makes_of_the_values(
    there, here, world, tmp_path
):
    folder = str(tmp_path / "run")
    world(2, saves, folder, there, 5)
    assert loads(folder, here, 5)[0] == []
    assert [wrong for wrong, _ in world(4, loads, folder, here, 5)] == [[]] * 4


def test__columns__are_cut_as_well(world, tmp_path):
    folder = str(tmp_path / "run")
    world(2, saves, folder, "unit", 3, 1)
    assert loads(folder, "unit", 3)[0] == []
    assert [wrong for wrong, _ in world(4, loads, folder, "unit", 3, 0)] == [[]] * 4
    saves(folder, "unit", 4)
    assert [wrong for wrong, _ in world(2, loads, folder, "unit", 4, 1)] == [[]] * 2


def under_own_scales(folder, loading):
    """Moments with one scale per rank, as optimizers of torch make them."""
    model = made("bf16", 5)
    model, optimizer = sharded(model, moments(model, 5))
    whole = made("bf16", 5)
    whole = moments(whole, 5)
    before = contents(model, optimizer)
    if dist.is_initialized():
        for state in optimizer.state.values():
            own = state["exp_avg"].to_local()
            factor = 2.0 ** (7 * (1 + dist.get_rank()))
            own.qdata.div_(factor), own.scale.mul_(factor), own.rms.mul_(2 + dist.get_rank())
        assert different(contents(model, optimizer), before)
        before = contents(model, optimizer)
    if not loading:
        return checkpoint.save(folder, model, optimizer)
    other = made("bf16", 100)
    other, states = sharded(other, moments(other, 100))
    checkpoint.load(folder, other, states)
    values = [state["exp_avg"] for state in states.state.values()]
    values = [x.full_tensor() if isinstance(x, DTensor) else x for x in values]
    expected = [state["exp_avg"] for state in whole.state.values()]
    same = all(
        torch.equal(x.dequantize(), y.dequantize()) for x, y in zip(values, expected, strict=True)
    )
    return same, different(contents(other, states), before)


def test__shards_under_scales_of_their_own__come_back_under_them__elsewhere_under_one(
    world, tmp_path
):
    folder = str(tmp_path / "run")
    world(2, under_own_scales, folder, False)
    assert world(2, under_own_scales, folder, True) == [(True, [])] * 2
    same, changed = under_own_scales(folder, True)
    assert same
    assert set(changed) <= {f"{n} exp_avg" for n, _ in made("plain").named_parameters()}
    assert world(4, under_own_scales, folder, True)[3][0]


def in_blocks(x, rounded=None):
    """A state in 8 bits, under each rank's own scales of blocks."""
    part = x.to_local() if isinstance(x, DTensor) else x
    part = value_of(part)
    codes = sct.scaled(part.detach(), "e4m3fn", "amax", sct.PerBlock((1, 4)))
    return of_local(codes, x) if isinstance(x, DTensor) else codes


class Blocks(torch.optim.AdamW):
    """An optimizer that keeps its state as given; its module is not torch's."""

    def load_state_dict(self, state_dict):
        self.taken = state_dict["state"]


def of_blocks(model, optimizer):
    taken = Blocks(groups_like(model))
    for p, state in optimizer.state.items():
        taken.state[p] = {
            k: in_blocks(x) if k == "exp_avg" and x.dim() > 1 else x for k, x in state.items()
        }
    return taken


def saves_blocks(folder, kind):
    model = made(kind, 5)
    model, optimizer = sharded(model, moments(model, 5))
    checkpoint.save(folder, model, of_blocks(model, optimizer))


def loads_blocks(folder, kind, ranks):
    """Return whether each state has the kind that it has here, and otherwise the values of the
    saved shards."""
    model = made(kind, 5)
    model, optimizer = sharded(model, moments(model, 5))
    here, other = of_blocks(model, optimizer), Blocks(groups_like(model))
    checkpoint.load(folder, model, other)
    model = made(kind, 5)
    whole = Blocks(groups_like(model))
    whole.state = moments(model, 5).state
    expected = {
        i: torch.cat([in_blocks(c).dequantize() for c in pieces_of(state["exp_avg"], ranks)])
        for i, state in whole.state_dict()["state"].items()
    }
    kept, right = [], []
    for i, state in here.state_dict()["state"].items():
        mine, theirs = state["exp_avg"], other.taken[i]["exp_avg"]
        if isinstance(local(mine), sct.CodedTensor):
            kept.append(bits(mine) == bits(theirs))
            theirs = local(theirs)
            right.append(torch.equal(value_of(theirs), of_rank(expected[i], mine)))
    return all(kept), any(kept), all(right) and len(right) > 1


def pieces_of(x, ranks):
    return value_of(x).chunk(ranks)


def of_rank(values, like):
    if not isinstance(like, DTensor):
        return values
    mesh = like.device_mesh
    return cut(values, mesh).to_local()


@pytest.mark.parametrize("kind", ["plain", "unit"])
def test__codes_under_scales_of_blocks__come_back_to_as_many_ranks__elsewhere_as_values(
    kind, world, tmp_path
):
    folder = str(tmp_path / "run")
    world(4, saves_blocks, folder, kind)
    assert world(4, loads_blocks, folder, kind, 4) == [(True, True, True)] * 4
    assert [right for *_, right in world(2, loads_blocks, folder, kind, 4)] == [True] * 2
    assert loads_blocks(folder, kind, 4)[2]
    saves_blocks(folder, kind)
    assert loads_blocks(folder, kind, 1) == (True, True, True)
    assert [right for *_, right in world(4, loads_blocks, folder, kind, 1)] == [True] * 4


# --- wrapped models --------------------------------------------------------------------------


def batch():
    return gaussian(8, 6)


def steps(model, optimizer, n):
    losses = []
    for _ in range(n):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def wrapped(how, kind, seed):
    model = made(kind, seed)
    model.narrow.requires_grad_(False)  # no product reads it
    if how == "ddp":
        model = DistributedDataParallel(model)
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model.last, model):
            fully_shard(part, mesh=mesh)
    if how == "compiled":
        model = torch.compile(model, backend="eager")
    return model, torch.optim.AdamW(groups_like(model), lr=0.3)


def trains(how, kind, folder):
    model, optimizer = wrapped(how, kind, 1)
    steps(model, optimizer, 7)
    checkpoint.save(folder, model, optimizer)
    return steps(model, optimizer, 5)


def continues(how, kind, folder):
    model, optimizer = wrapped(how, kind, 2)
    checkpoint.load(folder, model, optimizer)
    return steps(model, optimizer, 5)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("ddp", "unit"),
        pytest.param("fsdp2", "plain", marks=pytest.mark.slow),
        ("fsdp2", "unit"),
        ("fsdp2", "stored"),
    ],
)
def test__a_wrapped_model__goes_on_where_it_was__on_any_number_of_ranks(how, kind, world, tmp_path):
    folder = str(tmp_path / "run")
    losses = world(2, trains, how, kind, folder)
    assert world(2, continues, how, kind, folder) == losses
    assert torch.allclose(torch.tensor(continues("whole", kind, folder)), torch.tensor(losses[0]))
    assert torch.allclose(
        torch.tensor(world(4, continues, how, kind, folder)), torch.tensor(losses[0])
    )
    kept = trains("compiled", kind, folder)
    assert continues("whole", kind, folder) == kept


def into_a_used_one(folder, kind):
    """Return the losses of a training, and of a second one that continues from a checkpoint of its
    middle."""
    model, optimizer = wrapped("fsdp2", kind, 1)
    steps(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    losses = steps(model, optimizer, 3)
    model, optimizer = wrapped("fsdp2", kind, 2)
    steps(model, optimizer, 4)  # The weight knows the amax of its own elements.
    checkpoint.load(folder, model, optimizer)
    return losses, steps(model, optimizer, 3)


@pytest.mark.parametrize("kind", ["unit", "stored"])
def test__a_model_in_use__forgets_what_ranks_knew_of_its_weights(kind, world, tmp_path):
    for losses, found in world(2, into_a_used_one, str(tmp_path / "run"), kind):
        assert found == losses


def puts_whole_tensors(how, kind, path):
    model, _ = wrapped(how, kind, 1)
    checkpoint.load_into(model, checkpoint.load_safetensors(path))
    expected, _ = sharded(made(kind, 5)) if how == "fsdp2" else (made(kind, 5), None)
    return different(contents(model), contents(expected))


@pytest.mark.parametrize("source", ["plain", "unit"])
def test__whole_tensors__go_into_a_sharded_model(source, world, tmp_path):
    path = str(tmp_path / "model.safetensors")
    checkpoint.save_safetensors(made(source, 5), path)
    assert world(2, puts_whole_tensors, "fsdp2", "plain", path) == [[], []]


# --- torch.distributed.checkpoint by itself --------------------------------------------------


def saves_and_loads_by_torch(folder, kind):
    model, _ = sharded(made(kind, 5))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    other, _ = sharded(made(kind, 100))
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return different(contents(other), contents(model))


@pytest.mark.parametrize("kind", KINDS)
def test__torchs_own_save_and_load__bring_all_bits_to_as_many_ranks(kind, world, tmp_path):
    # torch reads neither elements nor scale for a rank without rows; `apart` does.
    empty = [] if kind == "plain" else ["narrow"]
    assert world(2, saves_and_loads_by_torch, str(tmp_path), kind) == [[], empty]


def saves_apart(folder, kind):
    model, _ = sharded(made(kind, 5))
    saving = dcp.async_save({"model": checkpoint.apart(model.state_dict())}, checkpoint_id=folder)
    saving.result()


def loads_apart(folder, kind):
    model, _ = sharded(made(kind, 100))
    dcp.load({"model": checkpoint.apart(model.state_dict(), loading=True)}, checkpoint_id=folder)
    expected, _ = sharded(made(kind, 5))
    return different(contents(model), contents(expected))


def test__apart__reshards_and_saves_in_the_background_by_torch_alone(world, tmp_path):
    world(4, saves_apart, str(tmp_path), "stored")
    assert world(2, loads_apart, str(tmp_path), "stored") == [[], []]
    assert loads_apart(str(tmp_path), "stored") == []


def states_apart(folder):
    """torch's own state dicts of a model and an optimizer; the optimizer has its own scales."""
    model, optimizer = wrapped("fsdp2", "unit", 1)
    steps(model, optimizer, 2)
    weights, states = get_state_dict(model, optimizer)
    message = told(checkpoint.apart, {"optimizer": states})
    dcp.save({"model": checkpoint.apart(weights)}, checkpoint_id=folder)
    other, _ = wrapped("fsdp2", "unit", 2)
    weights = get_model_state_dict(other)
    dcp.load({"model": checkpoint.apart(weights, loading=True)}, checkpoint_id=folder)
    set_model_state_dict(other, weights)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return message, all(torch.equal(whole(p), whole(q)) for p, q in pairs)


def test__apart__takes_torchs_state_dicts__and_refuses_scales_of_single_ranks(world, tmp_path):
    for message, same in world(2, states_apart, str(tmp_path / "run")):
        assert "the shards of optimizer.state." in message
        assert "have different scales" in message
        assert same


# --- what is refused -------------------------------------------------------------------------


def told(action, *args):
    """Return the message of the CheckpointError that `action` raises."""
    with pytest.raises(CheckpointError) as caught:
        action(*args)
    return str(caught.value)


def saves_other_scales(folder):
    model, _ = sharded(made("stored", 5))
    if dist.get_rank() == 1:
        model.frozen.weight.to_local().scale.mul_(2)
    return told(checkpoint.save, folder, model)


def saves_other_extra(folder):
    model, _ = sharded(made("unit", 5))
    return told(lambda: checkpoint.save(folder, model, extra={"seed": dist.get_rank()}))


def saves_what_one_cannot(folder):
    model, _ = sharded(made("unit", 5))
    extra = print if dist.get_rank() == 1 else None
    return told(lambda: checkpoint.save(folder, model, per_rank=extra))


def test__what_ranks_disagree_on__is_refused_by_name_on_each(world, tmp_path):
    folder = str(tmp_path / "run")
    for message in world(2, saves_other_scales, folder):
        assert "the shards of model.frozen.weight have different scales" in message
    for message in world(2, saves_other_extra, folder):
        assert "extra is not the same on rank 1 as on rank 0" in message
    messages = world(2, saves_what_one_cannot, folder)
    assert messages[0].startswith("rank 1: ")
    assert "safe loading refuses" in messages[1]
    assert list(tmp_path.iterdir()) == []


def refuses(folder, kind):
    """Return the message, and the names that changed."""
    model = made(kind, 100)
    model, optimizer = sharded(model, moments(model, 100))
    before = contents(model, optimizer)
    message = told(checkpoint.load, folder, model, optimizer)
    return message, different(contents(model, optimizer), before)


def test__a_missing_shard__is_told_on_every_rank__and_nothing_changes(world, tmp_path):
    folder = tmp_path / "run"
    world(4, saves, str(folder), "unit", 5)
    (folder / "__2_0.distcp").unlink()
    for message, changed in world(2, refuses, str(folder), "unit"):
        assert "__2_0.distcp is missing" in message
        assert changed == []


def saves_files_of_its_own(folder):
    model, _ = sharded(made("unit", 5))
    torch.save(model.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")


def loads_files_of_its_own(folder):
    model, _ = sharded(made("unit", 100))
    before = contents(model)
    try:
        state = torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=True)
    except BaseException as error:
        return "in torch.load: " + str(error), []
    message = told(checkpoint.load_into, model, state)
    return message, different(contents(model), before)


def loads_files_of_as_many(folder):
    model, _ = sharded(made("unit", 100))
    state = torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=True)
    checkpoint.load_into(model, state)
    return different(contents(model), contents(sharded(made("unit", 5))[0]))


def test__files_of_single_ranks__load_on_as_many_ranks_and_no_others(world, tmp_path):
    world(4, saves_files_of_its_own, str(tmp_path))
    assert world(4, loads_files_of_as_many, str(tmp_path)) == [[]] * 4
    for message, changed in world(2, loads_files_of_its_own, str(tmp_path)):
        assert "cut by (Shard(dim=0),) on 4 ranks" in message
        assert changed == []


def of_another_model(folder):
    model, _ = sharded(made("unit", 5))
    checkpoint.save(folder, model)
    with torch.no_grad():
        model.last = nn.Linear(11, 7)
    before = contents(model)
    message = told(checkpoint.load, folder, model)
    return message, different(contents(model), before)


def test__another_model__is_refused_on_every_rank(world, tmp_path):
    for message, changed in world(2, of_another_model, str(tmp_path / "run")):
        assert "last.weight is (6, 11) there and (7, 11) here" in message
        assert changed == []


# --- meshes of two dimensions ----------------------------------------------------------------


class Pair(nn.Module):
    """Two products that two ranks share, and a weight that they do not."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 12)
        self.last = nn.Linear(12, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.last(self.first(x).relu()))


def pair(kind, seed):
    model = Pair(seed)
    return model if RECIPES[kind] is None else sct.scale_model(model, RECIPES[kind])


def in_two_dimensions(kind, seed):
    """Columns and rows by tensor parallelism, and both of them by `fully_shard`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, styles = pair(kind, seed), parallel if kind == "plain" else sct.distributed
    plan = {"first": styles.ColwiseParallel(), "last": styles.RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def saves_in_two_dimensions(folder, kind):
    model, optimizer = in_two_dimensions(kind, 5)
    steps(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    values = {name: whole(p).clone() for name, p in model.named_parameters()}
    return steps(model, optimizer, 3), values


def loads_in_two_dimensions(folder, kind):
    model, optimizer = in_two_dimensions(kind, 100)
    checkpoint.load(folder, model, optimizer)
    return steps(model, optimizer, 3)


def loads_in_one(folder, kind, how, values=None):
    model = pair(kind, 100)
    if how == "fsdp2":
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoint.load(folder, model, optimizer)
    for name, value in (values or {}).items():
        assert torch.equal(whole(model.get_parameter(name)), value)
    return steps(model, optimizer, 3)


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "unit"])
def test__columns_and_rows_under_fully_shard__go_on_when_cut_otherwise(kind, world, tmp_path):
    folder = str(tmp_path / "run")
    saved = world(4, saves_in_two_dimensions, folder, kind)
    assert world(4, loads_in_two_dimensions, folder, kind) == [losses for losses, _ in saved]
    losses, values = saved[0]
    # The sums are bfloat16.
    expected = pytest.approx(losses, rel=1e-4 if kind == "plain" else 2**-8)
    assert loads_in_one(folder, kind, "whole", values) == expected
    assert world(2, loads_in_one, folder, kind, "fsdp2", values)[0] == expected


# --- whole tensors placed on ranks -----------------------------------------------------------


def placed(seed):
    model = pair("unit", seed)
    return model, sct.distributed.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)


def saves_placed(folder):
    model, optimizer = placed(5)
    steps(model, optimizer, 2)
    checkpoint.save(folder, model, optimizer)
    return steps(model, optimizer, 3)


def loads_placed(folder):
    model, optimizer = placed(100)
    checkpoint.load(folder, model, optimizer)
    return steps(model, optimizer, 3)


def test__states_placed_on_ranks__go_on_on_any_number_of_them(world, tmp_path):
    folder = str(tmp_path / "run")
    losses = world(2, saves_placed, folder)
    assert world(4, loads_placed, folder) == [losses[0]] * 4
    assert loads_in_one(folder, "unit", "whole") == losses[0]
