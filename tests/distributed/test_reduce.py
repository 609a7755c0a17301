"""Gradients are reduced in FP8: every rank gets the same result, near the sum."""

import copy

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import scaledtensor as sct
from scaledtensor.distributed import (
    AutoScales,
    FP8State,
    Wire,
    fp8_all_reduce,
    fp8_all_reduce_hook,
    fp8_reduce_scatter,
    use_fp8_reduce_scatter,
)
from scaledtensor.errors import DistributedError, DTypeError, FormatError, ModelError

WIRES = [
    Wire(),
    Wire("e5m2"),
    Wire(scaling="auto"),
    Wire("e5m2", "auto"),
    Wire(gather="bf16"),
    Wire(rounding="stochastic"),
]
#: The bound is relative to the largest magnitude of the block: two times half a step of the
#: coarsest binade.
STEP = {"e4m3fn": 2**-4, "e5m2": 2**-3}


def gradient(n, rank, seed=0, tail=0.0):
    """Return Gaussian numbers, or numbers with magnitudes spread as exp(tail * Gaussian)."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(n, generator=g)
    return x * (tail * torch.randn(n, generator=g)).exp()


def everyone(n, world, **kwargs):
    return torch.stack([gradient(n, rank, **kwargs).double() for rank in range(world)])


def both(wire, n, scale):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    whole = gradient(world * n, rank) * scale
    part = torch.empty(n)
    fp8_reduce_scatter(part, whole, wire=wire)
    fp8_all_reduce(whole, op=dist.ReduceOp.AVG, wire=wire)
    return part, whole


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test__a_sum__is_that_of_all_ranks_up_to_rounding__equal_on_all(world, wire):
    n, ranks = 500, 4
    results = world(ranks, both, wire, n, 1.0)
    truth = everyone(ranks * n, ranks)
    of_one = truth.abs().amax() * STEP[wire.format.name]
    for rank, (part, whole) in enumerate(results):
        assert torch.equal(whole, results[0][1])
        own = slice(rank * n, (rank + 1) * n)
        assert (part - truth.sum(0)[own]).abs().amax() <= ranks * of_one
        assert 0 < (whole - truth.mean(0)).abs().amax() <= 2 * of_one
        error = (part - truth.sum(0)[own]).norm() / truth.sum(0)[own].norm()
        assert error < (0.05 if wire.format.name == "e4m3fn" else 0.1)


def by_hand(x, fmt):
    """Return blocks of 128, or a row's rest, each under the smallest power of two that fits."""
    limit, kind = {
        "e4m3fn": (448, ml_dtypes.float8_e4m3fn),
        "e5m2": (57344, ml_dtypes.float8_e5m2),
    }[fmt]
    out = np.empty_like(x)
    for row in range(len(x)):
        for start in range(0, x.shape[1], 128):
            block = x[row, start : start + 128]
            scale = 2.0 ** np.ceil(np.log2(np.abs(block).max() / limit))
            out[row, start : start + 128] = (block / scale).astype(kind).astype(np.float32) * scale
    return out


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test__what_arrives__is_what_ml_dtypes_makes_of_it(world, fmt):
    n, ranks = 200, 2
    arrived = [by_hand(gradient(ranks * n, r).view(ranks, n).numpy(), fmt) for r in range(ranks)]
    sums = arrived[0] + arrived[1]
    whole = torch.from_numpy(by_hand(sums / 2, fmt)).flatten()
    for rank, result in enumerate(world(ranks, both, Wire(fmt), n, 1.0)):
        assert torch.equal(result[0], torch.from_numpy(sums[rank]))
        assert torch.equal(result[1], whole)


@pytest.mark.parametrize("k", [-60, -7, 33])
@pytest.mark.parametrize("wire", WIRES[:5], ids=str)
def test__a_power_of_two__moves_scales_and_no_code(world, wire, k):
    ones, moved = (world(2, both, wire, 300, 2.0**e) for e in (0, k))
    for (part, whole), (moved_part, moved_whole) in zip(ones, moved, strict=True):
        assert torch.equal(moved_part, part * 2.0**k)
        assert torch.equal(moved_whole, whole * 2.0**k)


def with_specials(wire):
    x = gradient(1024, dist.get_rank())
    x[200:328] = 0
    if dist.get_rank() == 1:
        x[3], x[700], x[1023] = torch.inf, torch.nan, -torch.inf
        x[400] = 1e38  # The element is finite, and the rest of its block is tiny beside it.
    part = torch.empty(512)
    fp8_reduce_scatter(part, x, wire=wire)
    fp8_all_reduce(x, wire=wire)
    return part, x


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test__zeros_stay__and_what_is_not_finite_arrives_alone(world, wire):
    results = world(2, with_specials, wire)
    for whole in (torch.cat([part for part, _ in results]), results[0][1], results[1][1]):
        assert whole.isfinite().logical_not().nonzero().flatten().tolist() == [3, 700, 1023]
        assert whole[200:328].eq(0).all()
        assert whole[400] / 1e38 == pytest.approx(1, rel=0.07)
        if wire.scaling == "block":
            truth = (gradient(1024, 0) + gradient(1024, 1))[512:]
            near = (whole[512:] - truth).abs() <= 2 * truth.abs().amax() * 2**-3
            assert near[torch.isfinite(whole[512:])].all()


def ops(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, out = gradient(4 * world, rank).to(dtype), {}
    kinds = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
    for name, op in kinds.items() | {"premul": dist.ReduceOp.PREMUL_SUM(0.125)}.items():
        out[name] = torch.empty(4, dtype=dtype)
        fp8_reduce_scatter(out[name], x, op=op)
    later, at_once = torch.empty(4, dtype=dtype), x.clone()
    work = fp8_reduce_scatter(later, x, async_op=True)
    other = fp8_all_reduce(at_once, async_op=True)
    assert not work.is_completed()
    assert work.wait()
    assert other.wait()
    assert work.is_completed()
    fp8_all_reduce(x)
    return out, later, torch.equal(at_once, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test__averages_and_factors__are_exact__and_later_is_the_same(world, dtype):
    for out, later, same in world(2, ops, dtype):
        assert torch.equal(out["avg"], out["sum"] / 2)
        assert torch.equal(out["premul"], out["sum"] / 8)
        assert torch.equal(later, out["sum"])
        assert later.dtype is dtype
        assert same


def shapes(n):
    x = gradient(n, dist.get_rank()).reshape(-1, 1) if n else torch.empty(0, 3)
    t = x.T  # The tensor is not contiguous if it has more than one dimension.
    fp8_all_reduce(t)
    wide = gradient(6 * 5, dist.get_rank()).view(6, 5).T
    fp8_all_reduce(wide)
    return t, wide


@pytest.mark.parametrize("n", [0, 1, 3, 129, 257])
def test__any_number_of_elements__is_shared_among_ranks(world, n):
    for t, wide in world(4, shapes, n):
        assert t.numel() == n
        truth = everyone(n, 4).sum(0)
        assert torch.allclose(t.flatten().double(), truth, atol=1.0, rtol=0.2)
        assert torch.allclose(wide.T.flatten().double(), everyone(30, 4).sum(0), atol=1, rtol=0.2)


def alone():
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    x, out = torch.tensor([1.0001, 2.0]), torch.empty(2)
    fp8_reduce_scatter(out, x, op=dist.ReduceOp.AVG, group=group)
    fp8_all_reduce(x, group=group)
    refused = ""
    try:
        fp8_all_reduce(x, group=groups[1 - dist.get_rank()])
    except DistributedError as error:
        refused = str(error)
    dist.destroy_process_group(group)
    return out, x, refused


def test__a_group_of_one__rounds_nothing__and_that_of_others_is_refused(world):
    for rank, (out, x, refused) in enumerate(world(2, alone)):
        assert torch.equal(out, torch.tensor([1.0001, 2.0]))
        assert torch.equal(x, out)
        assert refused == f"rank {rank} is not in the group that was given"


def auto_steps(steps, spiky, start=None):
    """Return mu after each step. The gradients of the steps in `spiky` have one large element, on
    one rank."""
    scales, rank, mus = AutoScales(), dist.get_rank(), []
    if start is not None:
        scales.load_state_dict({"b": torch.tensor(start)})
    for _ in range(steps):
        x = torch.full((1 << 17,), 1.0)
        x[::spiky] = 440.0 if rank else 1.0  # All ranks decide by the saturation on one rank.
        fp8_all_reduce(x, wire=Wire(scaling="auto"), scales=scales, bucket="b")
        mus.append(float(scales.mu["b"]))
    return mus, scales.state_dict()


def test__mu__halves_where_a_step_saturated__and_else_grows_to_two_in_a_thousand(world):
    # 440 is under 448, so it saturates in its 13th step, when mu is above 448 / 440.
    (mus, state), (others, _) = world(2, auto_steps, 30, 4)
    assert mus == others
    step = torch.tensor(1.0)
    for mu in mus[:13]:
        step = step * 4 ** (1 / 1000)
        assert mu == float(step)
    assert mus[13] == mus[12] / 2
    assert mus[29] == pytest.approx(mus[13] * 4 ** (16 / 1000))
    # 3 of 262,144 exceed 0.001%, and 2 do not.
    three, two = (world(2, auto_steps, 4, (1 << 17) // n, 1.997)[0][0] for n in (3, 2))
    assert three[0] == pytest.approx(1.997 / 2)
    assert two[1:] == [2.0, 2.0, 2.0]
    again = AutoScales()
    again.load_state_dict(state)
    assert again.state_dict() == state
    for bad in (torch.tensor(3.0), torch.tensor([1.0]), 1.0, torch.tensor(float("nan"))):
        with pytest.raises(DTypeError, match="1/2 to 2"):
            again.load_state_dict({"b": bad})
    assert again.state_dict() == state


def mean_of_draws(wire, draws):
    torch.manual_seed(7)  # the same on all ranks, as trainings do
    x = gradient(512, 0)  # The gradient is the same too; only the random draws differ.
    total = torch.zeros(512, dtype=torch.float64)
    square = 0.0
    for _ in range(draws):
        y = x.clone()
        fp8_all_reduce(y, op=dist.ReduceOp.AVG, wire=wire)
        total += y
        square += float((y - x).square().mean())
    return (total / draws - x).square().mean().item(), square / draws


def test__stochastic_rounding__is_unbiased__and_ranks_err_apart(world):
    wire = Wire(rounding="stochastic", gather="bf16")
    bias, two = world(2, mean_of_draws, wire, 200)[0]
    _, four = world(4, mean_of_draws, wire, 50)[0]
    assert bias < two / 50
    assert four == pytest.approx(two / 2, rel=0.15)


def errors_of(tail, n):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = gradient(n, rank, tail=tail)
    truth = everyone(n, world, tail=tail).mean(0)
    out = {}
    for name, wire in {
        "auto": Wire(scaling="auto"),
        "block": Wire(),
        "block, bf16 back": Wire(gather="bf16"),
        "block, e5m2": Wire("e5m2"),
    }.items():
        y = x.clone()
        fp8_all_reduce(y, op=dist.ReduceOp.AVG, wire=wire)
        out[name] = (y - truth).norm().item() / truth.norm().item()
        out[f"{name}, lost"] = (y == 0).double().mean().item()
    y = x.bfloat16() / world
    dist.all_reduce(y)
    out["bf16"] = (y - truth).norm().item() / truth.norm().item()
    return out


def test__errors__of_auto_and_of_blocks__beside_bf16s(world):
    gauss = world(4, errors_of, 0.0, 1 << 16)[0]
    heavy = world(4, errors_of, 3.0, 1 << 16)[0]
    assert gauss["bf16"] < 0.005
    for name in ("auto", "block"):
        assert gauss[name] < 0.045
    assert heavy["block"] < 0.045
    # One scale serves all elements. Those 2^18 below the largest are lost, and they are the
    # majority.
    assert heavy["auto, lost"] > 10 * heavy["block, lost"]
    assert gauss["block, bf16 back"] < 0.75 * gauss["block"]
    assert gauss["block, e5m2"] > 1.5 * gauss["block"]


def bad_input():
    out = []
    plain, half = torch.ones(4), torch.ones(2)
    for call in (
        lambda: fp8_reduce_scatter(half, torch.ones(5)),
        lambda: fp8_all_reduce(plain.double()),
        lambda: fp8_all_reduce(plain.int()),
        lambda: fp8_all_reduce(sct.scaled(plain)),
        lambda: fp8_all_reduce(plain.to_sparse()),
        lambda: fp8_all_reduce(plain, op=dist.ReduceOp.MAX),
        lambda: fp8_all_reduce(plain, wire="e4m3fn"),
        lambda: fp8_all_reduce(plain, group="world"),
        lambda: fp8_all_reduce_hook(None, None),
    ):
        try:
            call()
        except Exception as error:
            out.append((type(error).__name__, str(error)))
    return out, plain


def test__bad_input__is_told_before_anything_is_sent(world):
    told, plain = world(2, bad_input)[0]
    assert [kind for kind, _ in told] == [
        "ShapeError",
        *4 * ["DTypeError"],
        "UnsupportedError",
        "FormatError",
        "DistributedError",
        "DTypeError",
    ]
    assert "5 elements are not 2 times 2" in told[0][1]
    assert "ScaledTensor of torch.float32" in told[3][1]
    assert torch.equal(plain, torch.ones(4))


def test__without_a_process_group__it_says_what_to_call():
    with pytest.raises(DistributedError, match="init_process_group"):
        fp8_all_reduce(torch.ones(2))
    with pytest.raises(ModelError, match="fully_shard"):
        use_fp8_reduce_scatter(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("field", "value"),
    [("format", "bf16"), ("scaling", "tensor"), ("rounding", "up"), ("gather", "fp32")],
)
def test__a_wire__names_the_field_that_it_cannot_take(field, value):
    with pytest.raises(FormatError, match=f"{field} is"):
        Wire(**{field: value})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 32)
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        )
        self.head = nn.Linear(32, 17)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def batches(steps, rank):
    """Return sequences in which 5 t + 3 mostly follows token t."""
    g = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randint(17, (16, 8), generator=g)
        noise = torch.rand(x.shape, generator=g) < 0.1
        yield x, torch.where(noise, x, (5 * x + 3) % 17)


def ddp_losses(how, steps, multiply=1.0):
    """Return the mean losses over ranks and the final parameters."""
    torch.manual_seed(0)
    model = Model()
    # Buckets of a few kB give several buckets, so reductions overlap.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.004)
    state = None
    if how is not None:
        state = FP8State(how)
        parallel.register_comm_hook(state, fp8_all_reduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for x, y in batches(steps, dist.get_rank()):
        loss = nn.functional.cross_entropy(parallel(x).flatten(0, 1), y.flatten())
        (loss * multiply).backward()
        for p in model.parameters():
            p.grad /= multiply
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(float(mean) / dist.get_world_size())
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return losses, flat, state and {k: float(v) for k, v in state.state_dict().items()}


@pytest.mark.parametrize("wire", [Wire(), Wire(scaling="auto")], ids=str)
def test__ddp__trains_as_without_the_hook__and_replicas_stay_equal(world, wire):
    plain = world(4, ddp_losses, None, 30)[0][0]
    results = world(4, ddp_losses, wire, 30)
    losses = results[0][0]
    assert plain[-1] < plain[0] / 2
    assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < 0.03
    for other, flat, mus in results:
        assert other == losses
        assert torch.equal(flat, results[0][1])
        assert mus == results[0][2]
    if wire.scaling == "auto":
        assert len(mus) > 4  # buckets
        assert all(mu != 1 for mu in mus.values())


@pytest.mark.parametrize("wire", [Wire(), Wire(scaling="auto")], ids=str)
def test__ddp__is_bit_identical_under_a_multiplied_loss(world, wire):
    assert world(2, ddp_losses, wire, 10)[0][0] == world(2, ddp_losses, wire, 10, 2.0**20)[0][0]


def scaled_losses(way, wire, multiplier=1.0):
    """Reduce the gradients of a GPT of ScaledTensors. Each gradient has its own scale."""
    gpt = training.model()
    if way == "ddp":
        gpt = training.ddp(gpt, bucket_cap_mb=0.02)
        if wire is not None:
            gpt.register_comm_hook(FP8State(wire), fp8_all_reduce_hook)
    else:
        gpt = training.sharded(gpt)
        if wire is not None:
            use_fp8_reduce_scatter(gpt, wire)
    losses = training.train(gpt, 10, multiplier=multiplier)
    return losses, [training.whole(p) for p in gpt.parameters()]


@pytest.mark.parametrize(
    ("way", "wire"),
    [
        ("ddp", Wire()),
        ("fsdp", Wire(scaling="auto")),
        pytest.param("ddp", Wire(scaling="auto"), marks=pytest.mark.slow),
        pytest.param("fsdp", Wire(), marks=pytest.mark.slow),
    ],
)
def test__scaled_models__train_as_with_plain_reductions__bit_identical_under_a_multiplier(
    world, way, wire
):
    plain = world(2, scaled_losses, way, None)[0][0]
    (losses, values), (_, others) = world(2, scaled_losses, way, wire)
    assert plain[-1] < plain[0] - 0.2
    assert losses != plain
    assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < 0.02
    again, moved = world(2, scaled_losses, way, wire, 2.0**-18)[0]
    assert again == losses
    assert all(map(torch.equal, values, others))
    assert all(map(torch.equal, values, moved))


def accumulated(wire):
    """Gradients of two microbatches, where the first is not reduced and one parameter is unused."""
    torch.manual_seed(0)
    model, grads = Model(), []
    for hook in (False, True):
        copied = copy.deepcopy(model)
        parallel = DistributedDataParallel(copied, find_unused_parameters=True)
        if hook:
            parallel.register_comm_hook(FP8State(wire), fp8_all_reduce_hook)
        (x, y), (u, v) = batches(2, dist.get_rank())
        with parallel.no_sync():
            nn.functional.cross_entropy(parallel(x).flatten(0, 1), y.flatten()).backward()
        nn.functional.cross_entropy(parallel(u).flatten(0, 1), v.flatten()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in copied.parameters()]))
    return grads


def test__ddp__accumulates_without_the_hook_in_no_sync(world):
    for plain, fp8 in world(2, accumulated, Wire()):
        assert 0 < (fp8 - plain).norm() / plain.norm() < 0.05


def skipped(wire):
    torch.manual_seed(0)
    model = Model()
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(FP8State(wire), fp8_all_reduce_hook)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    scales = []
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        x, y = next(batches(1, dist.get_rank()))
        loss = nn.functional.cross_entropy(parallel(x).flatten(0, 1), y.flatten())
        if step == 1 and dist.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not all(map(torch.equal, before, model.parameters()))
        scales.append((moved, scaler.get_scale()))
    return scales


@pytest.mark.parametrize("wire", [Wire(), Wire("e5m2", "auto")], ids=str)
def test__a_grad_scaler__skips_on_all_ranks_what_overflowed_on_one(world, wire):
    first, second = world(2, skipped, wire)
    assert first == second == [(True, 65536.0), (False, 32768.0), (True, 32768.0)]


def hybrid(wire):
    """Two groups of two, each with all parameters."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    x, y = next(batches(1, dist.get_rank()))
    grads = []
    for how in (None, wire):
        torch.manual_seed(0)
        model = fully_shard(Model(), mesh=mesh)
        if how is not None:
            use_fp8_reduce_scatter(model, how)
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        grads.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    return grads


def test__hybrid_sharding__reduces_its_parts_in_fp8(world):
    results = world(4, hybrid, Wire())
    for plain, fp8 in results:
        assert torch.equal(fp8, results[0][1])
        assert 0 < (fp8 - plain).norm() / plain.norm() < 0.04


def fsdp_losses(wire, steps, reduce_dtype):
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in model.body:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    reductions = use_fp8_reduce_scatter(model, wire) if wire else {}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for x, y in batches(steps, dist.get_rank()):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    mus = {name: list(r.scales.state_dict().values()) for name, r in reductions.items()}
    return losses, mus


@pytest.mark.parametrize(
    ("wire", "reduce_dtype"), [(Wire(), torch.float32), (Wire(scaling="auto"), torch.bfloat16)]
)
def test__fsdp__trains_as_with_its_own_reduce_scatter(world, wire, reduce_dtype):
    plain, _ = world(2, fsdp_losses, None, 30, torch.float32)[0]
    losses, mus = world(2, fsdp_losses, wire, 30, reduce_dtype)[0]
    assert plain[-1] < plain[0] / 2
    assert max(abs(a - b) for a, b in zip(losses, plain, strict=True)) < 0.03
    assert losses != plain
    assert list(mus) == ["", "body.0", "body.1"]
    if wire.scaling == "auto":
        assert all(float(mu[0]) != 1 for mu in mus.values())
