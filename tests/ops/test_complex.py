"""Complex numbers have no scales. Beside a plain complex tensor an operator gives plain values."""

import pytest
import torch
from torch import nn

import scaledtensor as sct
from scaledtensor.errors import UnsupportedError

FUNCTIONS = {
    "mul": lambda w, z: w * z,
    "rmul": lambda w, z: z * w,
    "add": lambda w, z: w + z,
    "sub": lambda w, z: torch.sub(z, w, alpha=2),
    "div": lambda w, z: w / z,
    "rdiv": lambda w, z: z / w,
    "pow": lambda w, z: z**w,
    "cat": lambda w, z: torch.cat([w, z]),
    "stack": lambda w, z: torch.stack([z, w]),
    "addcmul": lambda w, z: torch.addcmul(z, w, w),
    "by_a_row": lambda w, z: z * w[0],
    "by_an_element": lambda w, z: w * z[0, 0],
    "by_one_of_ours": lambda w, z: z * w[0, 0],
    "in_place": lambda w, z: z.clone().mul_(w),
    "mul_number": lambda w, z: w * (1 + 2j),
    "rmul_number": lambda w, z: 1j * w,
    "add_number": lambda w, z: w + 2j,
    "sub_number": lambda w, z: torch.sub(w, 1j, alpha=2),
    "rsub_number": lambda w, z: 1j - w,
    "div_number": lambda w, z: w / 2j,
    "rdiv_number": lambda w, z: 1j / w,
    "pow_number": lambda w, z: w.square() ** 0.5j,
    "rpow_number": lambda w, z: 2j**w,
    "modes": lambda w, z: (1j * w[0] * torch.arange(3)[:, None]).exp(),
}


def both(function, compiled):
    torch.manual_seed(0)
    p, z = torch.randn(4, 5), torch.randn(4, 5, dtype=torch.complex64)
    w, q = sct.scaled(p).requires_grad_(), p.clone().requires_grad_()
    run = torch.compile(function, backend="aot_eager") if compiled else function
    made, want = run(w, z), function(q, z)
    for y in (made, want):
        y.abs().square().sum().backward()
    return made, want, w.grad.dequantize(), q.grad


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test__beside_a_complex_tensor__the_result_is_plain_and_keeps_its_imaginary_part(name, compiled):
    torch.compiler.reset()
    made, want, grad, want_grad = both(FUNCTIONS[name], compiled)
    assert type(made) is torch.Tensor
    assert made.dtype is want.dtype
    torch.testing.assert_close(made, want)
    torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-5)


def test__a_complex_write_into_real_elements__is_refused():
    w, z = sct.scaled(torch.randn(4, 5)), torch.randn(4, 5, dtype=torch.complex64)
    for factor in (z, 1j):
        with pytest.raises(UnsupportedError, match="writes a complex result into a ScaledTensor"):
            w.mul_(factor)


class GlobalFilter(nn.Module):
    """The filter of GFNet, in the frequencies of its input."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(33))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.gain, 64)


def test__a_filter_of_frequencies__trains_as_the_plain_one():
    torch.manual_seed(0)
    model, x = GlobalFilter(), torch.randn(8, 64)
    want = model(x)
    want.square().sum().backward()
    gradient = model.gain.grad.clone()
    model.zero_grad()
    sct.scale_model(model)
    y = model(x)
    y.square().sum().backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(model.gain.grad.dequantize(), gradient)
