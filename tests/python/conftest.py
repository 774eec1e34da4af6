import os
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# A compiler cache of an earlier build must not answer for this one.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
torch.set_num_threads(min(2, torch.get_num_threads()))

EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-23}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


class Problem:
    """Random X, W, targets with ignored rows; trained-like: the target's logit is raised."""

    def __init__(
        self,
        rows=23,
        hidden=19,
        vocab=101,
        dtype=torch.float32,
        weight_dtype=None,
        bias=False,
        ignored=True,
        shape=None,
    ):
        shape = shape or (rows,)
        self.x = torch.randn(*shape, hidden).to(dtype).requires_grad_()
        w = torch.randn(vocab, hidden) * 0.3
        self.w = w.to(weight_dtype or dtype).requires_grad_()
        self.b = torch.randn(vocab).to(weight_dtype or dtype).requires_grad_() if bias else None
        self.y = torch.randint(0, vocab, shape)
        if ignored and self.y.numel() > 3:
            self.y.view(-1)[::4] = -100

    def leaves(self):
        return [leaf for leaf in (self.x, self.w, self.b) if leaf is not None]


@pytest.fixture
def problem():
    return Problem


def gradients(value, leaves, upstream=None, **keywords):
    return torch.autograd.grad(value, leaves, upstream, **keywords)


def assert_near(actual, wanted, dtype, factor=64.0, what=""):
    """Norm of the difference within `factor` roundings of the dtype, relative to the norm wanted."""
    actual, wanted = actual.detach().double(), wanted.detach().double()
    assert actual.shape == wanted.shape, f"{what} {actual.shape} {wanted.shape}"
    assert torch.isfinite(actual).all() or not torch.isfinite(wanted).all(), what
    scale = wanted.norm().item() + 1e-30
    error = (actual - wanted).norm().item() / scale
    bound = factor * (EPSILON[dtype] if dtype in (torch.float32, torch.float64) else EPSILON[dtype] / 16)
    assert error <= bound or (actual - wanted).norm().item() <= 1e-12, (
        f"{what} relative error {error:.3g} > {bound:.3g}"
    )
