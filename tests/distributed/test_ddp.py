"""DistributedDataParallel on ScaledTensor parameters."""

import pytest
import torch
import torch.distributed as dist
import training

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError


def losses_of(recipe, steps, **options):
    gpt = training.ddp(training.model(recipe))
    return training.train(gpt, steps, **options), [training.whole(p) for p in gpt.parameters()]


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [
        ("unit", 2),
        ("current", 2),
        pytest.param("mxfp8", 2, marks=pytest.mark.slow),
        pytest.param("unit", 4, marks=pytest.mark.slow),
        pytest.param("current", 4, marks=pytest.mark.slow),
    ],
)
def test__a_training__is_that_of_one_process_that_accumulates(world, ranks, recipe):
    gpt = training.model(recipe)
    alone = training.train(gpt, 12, share=False, accumulate=ranks)
    results = world(ranks, losses_of, recipe, 12)
    for losses, values in results:
        assert losses == pytest.approx(alone, abs=2e-3 if ranks > 2 else 1e-6)
        same = [
            torch.equal(a, training.whole(b)) for a, b in zip(values, gpt.parameters(), strict=True)
        ]
        assert all(same) or ranks > 2
        assert all(torch.equal(a, b) for a, b in zip(values, results[0][1], strict=True))


def multiplied(multiplier):
    return losses_of("unit", 12, multiplier=multiplier)


def test__a_training__is_the_same_to_the_bit__with_the_loss_scaled(world):
    plain, scaled = (world(2, multiplied, m)[0] for m in (1.0, 2.0**-18))
    assert plain[0] == scaled[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], scaled[1], strict=True))


def other_seeds():
    gpt = training.model("unit", seed=dist.get_rank())
    before = {name: (p.scale.clone(), p.rms.clone()) for name, p in gpt.named_parameters()}
    training.ddp(gpt)
    return before, {
        name: (p.dequantize().detach(), p.scale, p.rms) for name, p in gpt.named_parameters()
    }


def test__parameters__start_as_those_of_the_first_rank__each_under_its_own_scale(world):
    (before, first), (_, second) = world(2, other_seeds)
    reference = dict(training.model("unit", seed=0).named_parameters())
    for name, (value, scale, rms) in second.items():
        assert torch.equal(value, reference[name].dequantize().detach())
        assert torch.equal(value, first[name][0])
        if before[name][1] > 0:
            assert scale == first[name][1] == before[name][0]
            assert rms == pytest.approx(float(before[name][1]), rel=1e-6)


def without_sync(steps):
    gpt = training.ddp(training.model("unit"))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    for inputs, targets in training.batches(steps):
        x, y = (t.chunk(2)[dist.get_rank()] for t in (inputs, targets))
        with gpt.no_sync():
            (gpt(x[:2], y[:2])[1] / 2).backward()
        (gpt(x[2:], y[2:])[1] / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [training.whole(p) for p in gpt.parameters()]


def test__gradients__accumulate_without_being_sent(world):
    first, second = world(2, without_sync, 5)
    gpt = training.model("unit")
    training.train(gpt, 5, share=False, accumulate=4)
    for a, b, c in zip(first, second, gpt.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, training.whole(c), rtol=0, atol=2e-3)


def reduced():
    x = sct.scaled(torch.tensor([1.0, 2.0, 3.0]) * 2.0 ** (10 * dist.get_rank()))
    dist.all_reduce(x)
    y = sct.scaled(torch.full((4,), 3.0 + dist.get_rank()), "e4m3fn")
    dist.broadcast(y, 1)
    return x, y


def test__collectives__are_of_values__whatever_the_scales_are(world):
    for x, y in world(2, reduced):
        assert torch.equal(x.dequantize(), torch.tensor([1025.0, 2050.0, 3075.0]))
        assert x.scale == 2.0**11
        assert torch.equal(y.dequantize(), torch.full((4,), 4.0))
        assert y.scale == 4.0
        assert y.format == sct.formats.E4M3FN


def received(scaled):
    """The tensors that each rank receives by the collectives that write into outputs."""
    rank = dist.get_rank()
    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]]) * 2.0 ** (4 * rank)
    held = sct.scaled(x, "bf16") if scaled else x

    def room(n=2):
        return torch.zeros_like(held[:1].expand(n, 2) if n != 2 else held)

    found = {}
    found["all_gather"] = [room(), room()]
    dist.all_gather(found["all_gather"], held)
    found["all_gather_into_tensor"] = room(4)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], held)
    found["gather"] = [room(), room()] if rank == 0 else None
    dist.gather(held, found["gather"], dst=0)
    found["all_to_all_single"] = room()
    dist.all_to_all_single(found["all_to_all_single"], held)
    found["reduce_scatter"] = room(1)
    dist.reduce_scatter(found["reduce_scatter"], list(held.chunk(2)))
    found["reduce_scatter_tensor"] = room(1)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], held)
    found["later"] = room(4)
    dist.all_gather_into_tensor(found["later"], held, async_op=True).wait()
    leaf = held.clone().requires_grad_()
    every = torch.distributed.nn.functional.all_gather(leaf)
    (every[0].sum() + 3 * every[1].sum()).backward()
    found["nn.all_gather"], found["gradient"] = [t.detach() for t in every], leaf.grad
    if rank == 0:
        dist.send(held, 1)
    else:
        found["sent"] = torch.empty(2, 2)
        dist.recv(found["sent"], 0)
    written = {name: t for name, t in found.items() if name not in ("gradient", "sent")}
    kinds = {type(t) for t in torch.utils._pytree.tree_leaves(written) if t is not None}
    plain = torch.utils._pytree.tree_map(
        lambda t: t.dequantize() if isinstance(t, sct.ScaledTensor) else t, found
    )
    return plain, [kind.__name__ for kind in kinds]


def test__what_collectives_write__is_what_they_write_into_plain_tensors(world):
    results = [world(2, received, scaled) for scaled in (False, True)]
    for (wanted, _), (found, kinds) in zip(*results, strict=True):
        assert found.keys() == wanted.keys()
        assert kinds == ["ScaledTensor"]
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0, msg=name)


def returned(scaled):
    """Return the values that functional collectives return and write, and the gradients of two
    losses across ranks."""
    import torch.distributed._functional_collectives as fc
    import torch.distributed.nn as dnn

    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(rank)
    x = torch.randn(64, 16) * 2.0**rank

    def held():
        return sct.scaled(x) if scaled else x.clone()

    found = {
        "all_to_all_single": fc.all_to_all_single(held(), None, None, group),
        "broadcast": fc.broadcast(held(), 0, group),
        "all_reduce_coalesced": fc.all_reduce_coalesced([held(), held()], "sum", group),
        "all_gather_coalesced": fc.all_gather_into_tensor_coalesced([held(), held()], group),
        "reduce_scatter_coalesced": fc.reduce_scatter_tensor_coalesced(
            [held(), held()], "sum", [0, 0], group
        ),
        "all_reduce_": torch.ops._c10d_functional.all_reduce_(held(), "sum", group.group_name),
    }
    compiled = torch.compile(
        lambda t: fc.all_to_all_single(t, None, None, group) * 2, backend="aot_eager"
    )
    found["compiled"] = compiled(held())
    leaf = held().requires_grad_()
    moved = fc.all_to_all_single_autograd(leaf, [32, 32], [32, 32], group)
    (moved * (1 + rank)).square().sum().backward()
    found["gradient"] = leaf.grad
    leaf = held().requires_grad_()
    torch.cat(dnn.all_gather(leaf)).square().sum().backward()
    found["gradient of all_gather"] = leaf.grad

    def values(y):
        if isinstance(y, list):
            return [values(t) for t in y]
        y = fc.wait_tensor(y.detach())
        return y.dequantize() if isinstance(y, sct.ScaledTensor) else y.clone()

    return {name: values(y) for name, y in found.items()}


def test__functional_collectives__wait_for_what_arrives(world):
    for ours, plain in zip(world(2, returned, True), world(2, returned, False), strict=True):
        assert ours.keys() == plain.keys()
        for name, want in plain.items():
            torch.testing.assert_close(ours[name], want, rtol=1e-2, atol=1e-3, msg=name)


def receives():
    x = sct.scaled(torch.ones(2))
    if dist.get_rank() == 0:
        with pytest.raises(UnsupportedError, match="receive it into a plain tensor"):
            dist.recv(x, 1)


def test__a_message_into_a_scaled_tensor__is_refused_by_name(world):
    world(2, receives)


def delayed_histories(shared):
    gpt = training.model("delayed")
    wrapped = training.ddp(gpt, broadcast_buffers=False)
    inputs, targets = next(training.batches(1))
    x, y = (t.chunk(2)[dist.get_rank()] for t in (inputs, targets))
    wrapped(x, y)[1].backward()
    if shared:
        sct.distributed.share_histories(wrapped)
    return {name: b[:, 0].clone() for name, b in gpt.named_buffers() if name.endswith("_amax")}


def test__histories__hold_what_any_rank_saw(world):
    (own, other), (first, second) = (world(2, delayed_histories, s) for s in (False, True))
    assert any(not torch.equal(own[name], other[name]) for name in own)
    for name in own:
        largest = torch.maximum(own[name], other[name])
        assert torch.equal(first[name], largest)
        assert torch.equal(second[name], largest)


def converted_late():
    gpt = training.model(None)
    ddp = training.ddp(gpt)
    told = []
    for convert in (lambda: sct.scale_model(ddp), lambda: sct.scale_model(gpt)):
        with pytest.raises(sct.errors.ModelError) as caught:
            convert()
        told.append(str(caught.value))
    return told, not any(isinstance(p, sct.ScaledTensor) for p in gpt.parameters())


def test__a_conversion_of_what_ddp_holds__is_refused_by_name(world):
    ((told, unchanged),) = world(1, converted_late)
    assert unchanged
    assert all("before DistributedDataParallel(model)" in words for words in told)


def switched(steps):
    gpt = training.model("unit")
    ddp = training.ddp(gpt)
    before = training.train(ddp, steps)
    sct.scale_model(gpt, "current")
    return before + training.train(ddp, steps)


def test__another_recipe__goes_into_what_ddp_holds(world):
    (losses,) = world(1, switched, 4)
    gpt = training.model("unit")
    alone = training.train(gpt, 4, share=False)
    sct.scale_model(gpt, "current")
    assert losses == pytest.approx(alone + training.train(gpt, 4, share=False), abs=1e-6)
