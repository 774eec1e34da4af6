"""logitless.numpy against the formulas in double."""

import numpy as np
import pytest

import logitless.numpy as ln

RNG = np.random.default_rng(5)


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def problem(dtype=np.float32, shape=(3, 5)):
    x = RNG.standard_normal((*shape, 17)).astype(dtype)
    w = RNG.standard_normal((29, 17)).astype(dtype)
    y = RNG.integers(0, 29, shape)
    y[0, 0] = -100
    return x, w, y


def wanted(x, w, y):
    z = x.astype(np.float64).reshape(-1, 17) @ w.astype(np.float64).T
    p, flat, kept = softmax(z), y.reshape(-1), y.reshape(-1) != -100
    rows = np.where(kept, -np.log(p[np.arange(len(flat)), np.where(kept, flat, 0)]), 0.0)
    d = p - np.eye(29)[np.where(kept, flat, 0)]
    return rows, np.where(kept[:, None], d, 0.0), kept.sum()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_loss_and_gradients(dtype):
    x, w, y = problem(dtype)
    rows, d, kept = wanted(x, w, y)
    result = ln.linear_cross_entropy(
        x, w, y, gradients=("input", "weight"), grad_loss=-2.0, outputs=("lse", "kept", "argmax", "correct")
    )
    tolerance = 3e-3 if dtype == np.float16 else 2e-6
    np.testing.assert_allclose(result.loss, rows.sum() / kept, rtol=2e-6)
    np.testing.assert_allclose(result.grad_input.reshape(-1, 17), -2 / kept * d @ w.astype(np.float64), atol=tolerance)
    np.testing.assert_allclose(
        result.grad_weight, -2 / kept * d.T @ x.astype(np.float64).reshape(-1, 17), atol=tolerance
    )
    assert result.grad_weight.dtype == dtype
    assert result.kept == kept == 14
    assert result.argmax.shape == (3, 5)
    assert result.argmax[0, 0] == -1
    assert result.entropy is None


def test_bfloat16():
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    x, w, y = problem()
    result = ln.linear_cross_entropy(x.astype(bf16), w.astype(bf16), y, gradients=("weight",))
    rows, _, kept = wanted(x.astype(bf16).astype(np.float32), w.astype(bf16).astype(np.float32), y)
    np.testing.assert_allclose(result.loss, rows.sum() / kept, rtol=2e-6)
    assert result.grad_weight.dtype == bf16


def test_rows_and_upstream():
    x, w, y = problem()
    rows, d, _ = wanted(x, w, y)
    upstream = RNG.standard_normal((3, 5)).astype(np.float32)
    result = ln.linear_cross_entropy(x, w, y, reduction="none", gradients=("weight",), grad_row_loss=upstream)
    np.testing.assert_allclose(result.loss.reshape(-1), rows, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(
        result.grad_weight, (d * upstream.reshape(-1, 1)).T @ x.reshape(-1, 17).astype(np.float64), rtol=1e-4, atol=1e-5
    )


def test_logits_views_and_options():
    z = RNG.standard_normal((40, 58))[::2, ::1].astype(np.float32)
    y = RNG.integers(0, 58, 20)
    result = ln.cross_entropy(
        z[:, :58], y, label_smoothing=0.1, temperature=np.full(20, 2.0), gradients=("logits",), outputs=("entropy",)
    )
    p = softmax(z.astype(np.float64) / 2)
    t = 0.9 * np.eye(58)[y] + 0.1 / 58
    np.testing.assert_allclose(result.loss, -(t * np.log(p)).sum(-1).mean(), rtol=1e-6)
    np.testing.assert_allclose(result.grad_logits, (p - t) / 2 / 20, atol=1e-7)
    np.testing.assert_allclose(result.entropy, -(p * np.log(p)).sum(-1), rtol=1e-5)


def test_strided_hidden_is_read_in_place():
    x, w, y = problem(shape=(1, 8))
    wide = np.zeros((8, 40), np.float32)
    wide[:, 1:35:2] = x[0]
    assert ln.linear_cross_entropy(wide[:, 1:35:2], w[:, :], y[0]).loss == ln.linear_cross_entropy(x[0], w, y[0]).loss


def test_masks_and_soft_targets():
    x, w, y = problem()
    keep = RNG.random((3, 5, 29)) < 0.5
    z = x.reshape(-1, 17).astype(np.float64) @ w.astype(np.float64).T
    kept = y.reshape(-1) != -100
    mask = keep.reshape(-1, 29) | np.eye(29, dtype=bool)[np.where(kept, y.reshape(-1), 0)]
    p = softmax(np.where(mask, z, -np.inf))
    rows = -np.log(p[np.arange(15), np.where(kept, y.reshape(-1), 0)])
    assert np.isclose(ln.linear_cross_entropy(x, w, y, keep_mask=keep).loss, rows[kept].mean(), rtol=1e-6)
    soft = softmax(RNG.standard_normal((3, 5, 29))).astype(np.float32)
    assert np.isclose(
        ln.linear_cross_entropy(x, w, soft).loss, -(soft.reshape(-1, 29) * np.log(softmax(z))).sum(-1).mean(), rtol=1e-6
    )


def test_next_token_targets():
    ids = np.arange(8)
    assert ln.next_token_targets(ids, cu_seqlens=np.array([0, 3, 8])).tolist() == [1, 2, -100, 4, 5, 6, 7, -100]
    assert ln.next_token_targets(ids.astype(np.int32), ignore_index=-1).tolist() == [1, 2, 3, 4, 5, 6, 7, -1]


def test_refusals():
    x, w, y = problem()
    for kind, text, call in (
        (ValueError, "must be \\[\\.\\.\\., H\\]", lambda: ln.linear_cross_entropy(x[..., :3], w, y)),
        (ValueError, "target: shape", lambda: ln.linear_cross_entropy(x, w, y[:1])),
        (ValueError, "gradients: \\['logits'\\]", lambda: ln.linear_cross_entropy(x, w, y, gradients=("logits",))),
        (ValueError, "outputs: \\['x'\\]", lambda: ln.linear_cross_entropy(x, w, y, outputs=("x",))),
        (TypeError, "complex64", lambda: ln.linear_cross_entropy(x.astype(np.complex64), w, y)),
        (
            TypeError,
            "lable_smoothing: no such keyword; there are .*label_smoothing",
            lambda: ln.linear_cross_entropy(x, w, y, lable_smoothing=0.1),
        ),
        (IndexError, "99", lambda: ln.linear_cross_entropy(x, w, np.full((3, 5), 99))),
    ):
        with pytest.raises(kind, match=text):
            call()
