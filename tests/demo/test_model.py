import ast
import inspect

import pytest
import torch

from scaledtensor.apps import gpt as model
from scaledtensor.apps.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16)


def test__model__imports_nothing_from_scaledtensor():
    tree = ast.parse(inspect.getsource(model))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names}  # fmt: skip
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("scaledtensor") for name in names)


def test__model__compiles_in_one_graph_to_the_same_loss():
    torch.manual_seed(0)
    gpt, tokens = GPT(TINY), torch.randint(11, (3, 8))
    _, eager = gpt(tokens, tokens)
    _, compiled = torch.compile(gpt, fullgraph=True, backend="aot_eager")(tokens, tokens)
    torch.testing.assert_close(compiled, eager)


def test__model__does_not_look_ahead():
    torch.manual_seed(0)
    gpt, tokens = GPT(TINY), torch.randint(11, (1, 8))
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 11
    before, after = gpt(tokens)[0], gpt(other)[0]
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test__generate__keeps_the_prompt_runs_past_the_context_and_follows_its_generator():
    torch.manual_seed(0)
    gpt, prompt = GPT(TINY).eval(), torch.tensor([[1, 2, 3]])
    samples = [gpt.generate(prompt, 20, generator=torch.Generator().manual_seed(5)) for _ in "ab"]
    assert samples[0].shape == (1, 23)
    assert torch.equal(samples[0][:, :3], prompt)
    assert torch.equal(*samples)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_embd": 16, "n_head": 3}, "n_embd=16 is not divisible by n_head=3"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": float("nan")}, "dropout is nan"),
    ],
)
def test__impossible_config__is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(vocab_size=11, **fields)
