"""Programs as their authors write them: nanoGPT, a ResNet, a pooled CNN, recurrent networks.

They call only `unit_scale` and `simulate_fp8` of this library.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import scaledtensor as sct

TRANSFORMS = {
    "unit_scale": sct.unit_scale,
    "simulate_fp8": sct.simulate_fp8,
    "both": lambda model: sct.simulate_fp8(sct.unit_scale(model)),
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))


# --- nanoGPT: https://github.com/karpathy/nanoGPT, model.py and train.py ------------------------


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout
        self.flash = config.flash
        if not self.flash:
            size = config.block_size
            self.register_buffer("bias", torch.tril(torch.ones(size, size)).view(1, 1, size, size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if self.flash:
            y = torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None,
                dropout_p=self.dropout if self.training else 0,
                is_causal=True,
            )
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            att = F.softmax(att, dim=-1)
            att = self.attn_dropout(att)
            y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.0
    bias: bool = True
    flash: bool = True


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for pn, p in self.named_parameters():
            if pn.endswith("c_proj.weight"):
                torch.nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        device = idx.device
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        tok_emb = self.transformer.wte(idx)
        pos_emb = self.transformer.wpe(pos)
        x = self.transformer.drop(tok_emb + pos_emb)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(
                logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1
            )
        else:
            logits = self.lm_head(x[:, [-1], :])
            loss = None
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() < 2]
        optim_groups = [
            {"params": decay_params, "weight_decay": weight_decay},
            {"params": nodecay_params, "weight_decay": 0.0},
        ]
        fused_available = "fused" in inspect.signature(torch.optim.AdamW).parameters
        extra_args = {"fused": True} if fused_available and device_type == "cuda" else {}
        return torch.optim.AdamW(optim_groups, lr=learning_rate, betas=betas, **extra_args)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            size = self.config.block_size
            idx_cond = idx if idx.size(1) <= size else idx[:, -size:]
            logits, _ = self(idx_cond)
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v[:, [-1]]] = -float("Inf")
            probs = F.softmax(logits, dim=-1)
            idx_next = torch.multinomial(probs, num_samples=1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


DATA = (torch.arange(4096) ** 2 // 7) % 64


def get_batch(block_size=32, batch_size=8):
    ix = torch.randint(len(DATA) - block_size, (batch_size,))
    x = torch.stack([DATA[i : i + block_size] for i in ix])
    y = torch.stack([DATA[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss(model, eval_iters=2):
    model.eval()
    losses = torch.zeros(eval_iters)
    for k in range(eval_iters):
        X, Y = get_batch()
        _, loss = model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("flash", [True, False], ids=["flash", "manual"])
@every_transform
def test__nanogpt__trains_and_generates(transform: Any, flash: bool, dropout: float) -> None:
    torch.manual_seed(1337)
    model = transform(GPT(GPTConfig(dropout=dropout, flash=flash)))
    learning_rate = 3e-3 if transform is sct.simulate_fp8 else 5e-2
    optimizer = model.configure_optimizers(1e-1, learning_rate, (0.9, 0.95), "cpu")
    before = estimate_loss(model)
    for _ in range(8):
        for _micro_step in range(2):
            X, Y = get_batch()
            _, loss = model(X, Y)
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert estimate_loss(model) < before - 0.1
    model.eval()
    assert model.generate(torch.zeros((1, 1), dtype=torch.long), 36, top_k=5).shape == (1, 37)


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "manual"])
def test__nanogpt__is_of_unit_scale(flash: bool) -> None:
    torch.manual_seed(1337)
    model = sct.unit_scale(GPT(GPTConfig(flash=flash)))
    X, Y = get_batch()
    logits, loss = model(X, Y)
    loss.backward()
    assert 0.8 < logits.detach().std() < 1.25
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert 0.4 < p.grad.std() < 4, name


def test__a_compiled_nanogpt__is_the_same() -> None:
    torch.compiler.reset()
    torch.manual_seed(1337)
    X, Y = get_batch()
    model = sct.simulate_fp8(sct.unit_scale(GPT(GPTConfig(n_layer=1)), (X, Y)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters = list(model.parameters())
    found = torch.autograd.grad(compiled(X, Y)[1], parameters)
    expected = torch.autograd.grad(model(X, Y)[1], parameters)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()  # A rounding may fall to the other side.


# --- a ResNet, as in torchvision -----------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inplanes, planes, stride=1, inplace=True):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )
        self.inplace = inplace

    def forward(self, x):
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        if self.inplace:
            out += identity
        else:
            out = out + identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=inplace)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(16, 16, 1, inplace), BasicBlock(16, 16, 1, inplace))
        self.layer2 = nn.Sequential(BasicBlock(16, 32, 2, inplace), BasicBlock(32, 32, 1, inplace))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


@every_transform
def test__a_resnet_that_writes_in_place__is_the_one_that_does_not(transform: Any) -> None:
    results = []
    x, seed = torch.randn(8, 3, 16, 16), torch.randn(8, 10)
    for inplace in (True, False):
        torch.manual_seed(0)
        model = transform(ResNet(inplace))
        y = model(x)
        y.backward(seed)
        with torch.no_grad():
            model.eval()
            again = model(x)
        results.append([y.detach(), again, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results)


def test__a_resnet__is_of_unit_scale_and_trains() -> None:
    torch.manual_seed(0)
    model = sct.unit_scale(ResNet())
    x, y = torch.randn(32, 3, 16, 16), torch.arange(32) % 10
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    logits = model(x)
    assert 0.5 < logits.detach().std() < 1.5
    logits.backward(torch.randn(32, 10))
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert 1 / 2 < p.grad.std() < 2, name
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


# --- a pooled CNN --------------------------------------------------------------------------------


class PooledCNN(nn.Module):
    def __init__(self, norm, pool):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64) if norm else nn.Identity()
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.fc = nn.Linear(64, 10)
        self.pool = pool

    def features(self, x):
        x = F.avg_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.norm(self.conv2(x)))
        return F.relu(self.conv3(x))

    def forward(self, x, y):
        x = self.pool(self.features(x))
        logits = self.fc(x)
        return logits, x, F.cross_entropy(logits, y)


POOLS = {
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "module": nn.Sequential(nn.AvgPool2d(8), nn.Flatten()),
    "mean": lambda x: x.mean(dim=(2, 3)),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).mean(1),
}


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("pool", POOLS.values(), ids=list(POOLS))
def test__a_pooled_cnn__is_of_unit_scale(pool: Any, norm: bool) -> None:
    torch.manual_seed(0)
    model = sct.unit_scale(PooledCNN(norm, pool))
    x, y = torch.randn(16, 3, 16, 16), torch.arange(16) % 10
    logits, pooled, loss = model(x, y)
    pooled.retain_grad()
    loss.backward()
    assert 1 / 1.5 < pooled.detach().square().mean().sqrt() < 1.5
    assert 1 / 1.5 < logits.detach().square().mean().sqrt() < 1.5
    assert 1 / 1.5 < pooled.grad.std() < 1.5
    for name, p in model.named_parameters():
        if p.dim() > 1:
            # The figures are for sixteen images and one draw of the weights.
            assert 1 / 2 < p.grad.std() < 2, name


# --- recurrent networks --------------------------------------------------------------------------


class LanguageModel(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.recurrent = layer(64, 64, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens, state=None):
        output, state = self.recurrent(self.embedding(tokens), state)
        return self.head(output), state


class Classifier(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.recurrent = layer(64, 64, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, tokens):
        output, _ = self.recurrent(self.embedding(tokens))
        return self.head(output[:, -1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("kind", [LanguageModel, Classifier])
def test__a_recurrent_network__reads_out_at_unit_scale(kind: Any, layer: Any) -> None:
    torch.manual_seed(0)
    model = sct.unit_scale(kind(layer))
    for length in (16, 48):  # These are of one plan.
        tokens = torch.randint(50, (16, length))
        out = model(tokens)
        logits = out[0] if isinstance(out, tuple) else out
        assert 1 / 1.3 < logits.detach().std() < 1.3
    logits.backward(torch.randn_like(logits))
    for name, p in model.named_parameters():
        if p.dim() > 1:
            assert 0.1 < p.grad.std() < 4, name


@every_transform
def test__an_lstm_language_model__trains_and_goes_on_from_a_state(transform: Any) -> None:
    torch.manual_seed(0)
    model = transform(LanguageModel(nn.LSTM))
    tokens = torch.arange(17).repeat(8, 1) * 3 % 50
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        logits, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    model.eval()
    with torch.no_grad():
        whole, _ = model(tokens)
        state, steps = None, []
        for token in tokens.split(1, dim=1):
            logits, state = model(token, state)
            steps.append(logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-3, atol=1e-3)
