"""logitless.patch on random tiny models of transformers: loss and every parameter's gradient against the original's.

Both sides are fp32 sums of the same terms in different orders, so a gradient may differ by some rounding units of its
norm, or where it is nothing but rounding (key biases) of the largest gradient's. Every patched call is counted by
logitless.op_calls(): a test that ran the original by mistake fails.
"""

from __future__ import annotations

import copy
import inspect
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import logitless
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here; nothing is fetched
transformers = pytest.importorskip("transformers", exc_type=ImportError)
from logitless.integrations.huggingface import NO_LOGITS, LogitsNotComputed, UnsupportedModel  # noqa: E402

VOCAB = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Class, configuration and what the probe must find: the scale and the softcap of the installed source's forward.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], float, float | None]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", COMMON, 1.0, None),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**COMMON, "head_dim": 8, "tie_word_embeddings": True}, 1.0, None),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**COMMON, "head_dim": 8, "final_logit_softcapping": 30.0},
        1.0,
        30.0,
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**COMMON, "head_dim": 8}, 1.0, None),
    "gemma3-capped": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**COMMON, "head_dim": 8, "final_logit_softcapping": 0.5},
        1.0,
        0.5,
    ),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**COMMON, "logits_scaling": 4.0}, 0.25, None),
    "hyperclovax": ("HyperCLOVAXForCausalLM", "HyperCLOVAXConfig", {**COMMON, "logits_scaling": 4.0}, 4.0, None),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**COMMON, "logit_scale": 0.25}, 0.25, None),
    "phi": ("PhiForCausalLM", "PhiConfig", COMMON, 1.0, None),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, 1.0, None),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**COMMON, **EXPERTS, "output_router_logits": True}, 1.0, None),
    "minicpm3": (
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        # Divides hidden states before the head, so the head sees them scaled.
        {**COMMON, **LATENT, "num_key_value_heads": 4, "dim_model_base": 8},
        1.0,
        None,
    ),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for other threads
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="logitless")
        yield
    torch.set_num_threads(threads)


def make(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A random model in training mode whose norms and biases are not the ones and zeros of a fresh model."""
    name, config, settings, _, _ = FAMILIES[family]
    torch.manual_seed(3)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**settings, **more}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).train()


def batch(rows: int = 2, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [rows, length], a prompt and a later token ignored."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[-1, 5] = -100
    return ids, labels


def calls() -> int:
    """How often an operator ran that computes a loss."""
    counted = logitless.op_calls()
    return counted["forward"] + counted["forward_backward"]


def gradients(model: Any, run: Callable[[Any], torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients by parameter name; random layers draw the same numbers in every call."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(11)
    loss = run(model)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(
    model: Any, original: Any, run: Callable[[Any], torch.Tensor], eps: float = torch.finfo(torch.float32).eps
) -> None:
    """The patched model against the original on the same call; the patched one ran Logitless, the original did not."""
    before = calls()
    expected_loss, expected = gradients(original, run)
    assert calls() == before
    loss, found = gradients(model, run)
    assert calls() == before + 1
    assert loss == pytest.approx(expected_loss, rel=16 * eps)
    assert found.keys() == expected.keys() and len(found) > 5
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name].float() - gradient.float()).norm())
        assert error <= eps * (64 * float(gradient.float().norm()) + largest), name


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_originals(family: str) -> None:
    model = make(family)
    original = copy.deepcopy(model)
    assert logitless.patch(model) is model
    assert model._logitless.transform == (pytest.approx(FAMILIES[family][3]), FAMILIES[family][4])
    ids, labels = batch()
    assert_same(model, original, lambda m: m(input_ids=ids, labels=labels).loss)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    assert_same(model, original, lambda m: m(ids, attention_mask=mask, labels=labels, num_items_in_batch=31).loss)
    found, expected = model(input_ids=ids, labels=labels), original(input_ids=ids, labels=labels)
    assert type(found) is type(expected) and list(found) == list(expected)
    with pytest.raises(LogitsNotComputed, match="logits=True"):
        found.logits.argmax(-1)


def test_labels_are_shifted_once_and_hidden_states_not_at_all() -> None:
    model = make("llama")
    ids, labels = batch()
    logits = model(ids).logits.detach()
    logitless.patch(model)
    loss = model(ids, labels=labels).loss.item()
    cross_entropy = torch.nn.functional.cross_entropy
    assert loss == pytest.approx(float(cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())), rel=1e-6)
    for wrong in (0, 2):
        other = float(cross_entropy(logits[:, : 9 - wrong].flatten(0, 1), labels[:, wrong:].flatten()))
        assert abs(loss - other) > 1e-3
    # Labels that come shifted stay as they are.
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    assert float(model(ids, labels=labels, shift_labels=shifted).loss) == loss


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(17)},
        {"num_items_in_batch": torch.tensor(17.0)},
        {"ignore_index": 7},
        {"return_dict": False},
        {"output_hidden_states": True},
        {"use_cache": False},
    ],
    ids=str,
)
def test_keywords_of_the_loss_and_of_forward(more: dict[str, Any]) -> None:
    model = make("llama")
    original = copy.deepcopy(model)
    logitless.patch(model)
    ids, labels = batch()
    if "ignore_index" in more:
        labels = labels.masked_fill(labels == -100, 7)
    assert_same(model, original, lambda m: m(ids, labels=labels, **more)[0])
    found, expected = model(ids, labels=labels, **more), original(ids, labels=labels, **more)
    assert len(found) == len(expected) and type(found) is type(expected)


def test_shift_labels_and_positional_labels() -> None:
    model = make("gpt2").eval()
    original = copy.deepcopy(model)
    logitless.patch(model)
    ids, labels = batch()
    shifted = torch.randint(0, VOCAB, ids.shape)
    assert_same(model, original, lambda m: m(ids, labels=labels, shift_labels=shifted).loss)
    at = list(inspect.signature(original.forward).parameters).index("labels")
    assert_same(model, original, lambda m: m(ids, *[None] * (at - 1), labels)[0])


def test_experts_auxiliary_loss_is_added_where_the_original_adds_it() -> None:
    model = make("mixtral", output_router_logits=False, router_aux_loss_coef=0.5)
    original = copy.deepcopy(model)
    logitless.patch(model)
    ids, labels = batch()
    losses = []
    for more in (
        {},
        {"output_router_logits": True},
        {"output_router_logits": True, "attention_mask": torch.ones_like(ids)},
    ):
        assert_same(model, original, lambda m, more=more: m(ids, labels=labels, **more).loss)
        losses.append(float(model(ids, labels=labels, **more).loss))
    assert losses[1] > losses[0] + 0.1
    aux = model(ids, labels=labels, output_router_logits=True).aux_loss
    assert torch.equal(aux, original(ids, labels=labels, output_router_logits=True).aux_loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "hyperclovax"])
def test_sixteen_bit_models(family: str, dtype: torch.dtype) -> None:
    model = make(family, dtype)
    original = copy.deepcopy(model)
    logitless.patch(model)
    ids, labels = batch()
    # The original rounds its logits to 16 bits and Logitless does not: gradients agree to the dtype's rounding.
    assert_same(model, original, lambda m: m(ids, labels=labels).loss, eps=torch.finfo(dtype).eps / 8)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
def test_bf16_loss_is_nearer_to_a_float32_head_than_the_originals(family: str) -> None:
    model = make(family, torch.bfloat16).eval()
    ids, _ = batch(8, 32)
    with torch.no_grad():
        model.lm_head.weight.mul_(16.0)  # logits of a size at which bfloat16 is coarse
        hidden = model.base_model(ids).last_hidden_state.float()
        logits = hidden @ model.lm_head.weight.float().T / getattr(model.config, "logits_scaling", 1.0)
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        exact = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
        original = model(ids, labels=ids).loss.item()
        loss = logitless.patch(model)(ids, labels=ids).loss.item()
    assert loss == pytest.approx(exact, rel=1e-6)
    assert abs(original - exact) > 2 * abs(loss - exact)


def test_autocast_and_an_fp32_head_over_bf16_hidden_states() -> None:
    model = make("llama")
    original = copy.deepcopy(model)
    logitless.patch(model)
    ids, labels = batch()

    def run(m: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(ids, labels=labels).loss

    assert_same(model, original, run, eps=torch.finfo(torch.bfloat16).eps / 8)
    mixed = make("llama", torch.bfloat16)
    mixed.lm_head = mixed.lm_head.to(torch.float32)
    original = copy.deepcopy(mixed)
    logitless.patch(mixed)
    assert_same(mixed, original, run, eps=torch.finfo(torch.bfloat16).eps / 8)
    assert mixed.lm_head.weight.grad.dtype == torch.float32


def test_all_labels_ignored() -> None:
    ids, _ = batch()
    nothing = torch.full_like(ids, -100)
    model = make("llama")
    original = copy.deepcopy(model)
    logitless.patch(model)
    assert torch.isnan(original(ids, labels=nothing).loss) and torch.isnan(model(ids, labels=nothing).loss)
    # One micro-batch of an accumulated batch: zero, with gradients of zero.
    loss, found = gradients(model, lambda m: m(ids, labels=nothing, num_items_in_batch=12).loss)
    assert loss == 0.0 and found.keys() == gradients(original, lambda m: m(ids, labels=ids).loss)[1].keys()
    assert all(float(gradient.abs().max()) == 0.0 for gradient in found.values())
    logitless.unpatch(model)
    logitless.patch(model, on_empty="zero")
    loss, found = gradients(model, lambda m: m(ids, labels=nothing).loss)
    assert loss == 0.0 and all(float(gradient.abs().max()) == 0.0 for gradient in found.values())


def test_logits_are_kept_when_no_labels_come_or_when_asked() -> None:
    model = make("gemma2").eval()
    ids, labels = batch()
    original = copy.deepcopy(model)
    logitless.patch(model)
    before = calls()
    expected = original(ids, labels=labels)
    assert torch.equal(model(ids).logits, expected.logits)
    both = model(ids, labels=labels, logits=True)
    assert torch.equal(both.logits, expected.logits) and torch.equal(both.loss, expected.loss)
    assert torch.equal(model(ids, logits_to_keep=2).logits, expected.logits[:, -2:])
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False),
        original.generate(ids, max_new_tokens=4, do_sample=False),
    )
    assert calls() == before
    with torch.no_grad():
        assert model(ids, labels=labels).loss.item() == pytest.approx(float(expected.loss), rel=1e-6)
    assert calls() == before + 1
    logitless.unpatch(model)
    logitless.patch(model, eval_logits=True)
    before = calls()
    assert torch.equal(model(ids, labels=labels).logits, expected.logits) and calls() == before
    assert model.train()(ids, labels=labels).logits is NO_LOGITS and calls() == before + 1


def test_reading_logits_that_are_not_there_says_so() -> None:
    model = logitless.patch(make("llama"))
    ids, labels = batch()
    output = model(ids, labels=labels)
    reads: list[Callable[[Any], Any]] = [
        lambda z: z.shape,
        lambda z: z[..., 0],
        lambda z: torch.argmax(z, -1),
        lambda z: z / 2,
        lambda z: [*z],
        lambda z: z.float(),
        lambda z: bool(z),
    ]
    for read in reads:
        for logits in (output.logits, output["logits"], output[1]):
            with pytest.raises(LogitsNotComputed, match="without logits"):
                read(logits)
    assert not hasattr(output.logits, "dtype")  # what libraries ask of outputs
    assert copy.deepcopy(output.logits) is NO_LOGITS and pickle.loads(pickle.dumps(output.logits)) is NO_LOGITS
    assert "not computed" in repr(output)


def test_signature_is_kept() -> None:
    model = make("llama")
    signature, doc = inspect.signature(model.forward), type(model).forward.__doc__
    logitless.patch(model)
    assert inspect.signature(model.forward) == signature and model.forward.__doc__ == doc
    assert not hasattr(model.forward, "__wrapped__")


def test_unpatch_gives_everything_back() -> None:
    model = make("cohere")
    ids, labels = batch()
    expected = model(ids, labels=labels)
    state = copy.copy(model.__dict__)
    logitless.unpatch(logitless.patch(model))
    assert model.__dict__.keys() == state.keys() and not model.lm_head._forward_pre_hooks
    before = calls()
    found = model(ids, labels=labels)
    assert calls() == before and torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    assert logitless.unpatch(model) is model  # nothing to do
    # Wrapped in between, as accelerate does: the wrapper stays and calls the original.
    logitless.patch(model)
    before = calls()
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    logitless.unpatch(model)
    assert torch.equal(model(ids, labels=labels).logits, expected.logits) and calls() == before


def test_a_forward_that_lay_on_the_instance_is_called_and_comes_back() -> None:
    model = make("llama")
    seen: list[int] = []
    inner = model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return inner(*args, **kwargs)

    model.forward = counting
    logitless.patch(model)
    ids, labels = batch()
    seen.clear()
    assert model(ids, labels=labels).logits is NO_LOGITS and seen == [1]
    assert logitless.unpatch(model).forward is counting


def test_a_copy_runs_its_own_weights() -> None:
    model = logitless.patch(make("llama"))
    ids, labels = batch()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    before = calls()
    loss = other(ids, labels=labels).loss
    assert calls() == before + 1 and loss != model(ids, labels=labels).loss
    loss.backward()
    assert all(p.grad is None for p in model.parameters()) and other.lm_head.weight.grad is not None
    logitless.unpatch(other)
    assert other(ids, labels=labels).loss.item() == pytest.approx(float(loss), rel=1e-6)


def test_the_probe_leaves_no_trace() -> None:
    model = make("phi")
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]

    def draw(*_: Any) -> None:
        torch.rand(3)

    model.model.register_forward_hook(draw)
    state = torch.get_rng_state()
    parameters = [p.clone() for p in model.parameters()]
    logitless.patch(model)
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None for p in model.parameters()) and model._logitless.hidden is None


def test_a_model_that_changes_itself_on_a_short_sequence_is_given_back_as_it_was() -> None:
    torch.manual_seed(3)
    settings = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    config = transformers.BigBirdConfig(**settings, is_decoder=True, block_size=4, attention_type="block_sparse")
    model = transformers.BigBirdForCausalLM(config).train()
    modules = list(model.modules())
    logitless.patch(model)
    assert [*model.modules()] == modules and all(module.training for module in modules)
    assert model.bert.attention_type == model.bert.encoder.attention_type == "block_sparse"


def test_resized_embeddings_bring_a_new_head() -> None:
    model = logitless.patch(make("llama"))
    old = model.lm_head
    model.resize_token_embeddings(VOCAB + 8, mean_resizing=False)
    original = copy.deepcopy(model)
    logitless.unpatch(original)
    ids, labels = batch()
    assert_same(model, original, lambda m: m(ids, labels=labels).loss)
    assert not old._forward_pre_hooks and model.lm_head is not old and model.lm_head.weight.shape[0] == VOCAB + 8


def test_hidden_states_are_not_kept_alive() -> None:
    model = logitless.patch(make("llama"))
    ids, labels = batch()
    model(ids, labels=labels)
    assert model._logitless.hidden is None
    with pytest.raises(IndexError):
        model(ids, labels=labels.masked_fill(labels == -100, VOCAB))
    assert model._logitless.hidden is None and not model._logitless.armed


def test_frozen_head_and_frozen_body() -> None:
    ids, labels = batch()
    for frozen in ("model", "lm_head"):
        model = make("llama")
        getattr(model, frozen).requires_grad_(False)
        original = copy.deepcopy(model)
        logitless.patch(model)
        _, expected = gradients(original, lambda m: m(ids, labels=labels).loss)
        _, found = gradients(model, lambda m: m(ids, labels=labels).loss)
        assert found.keys() == expected.keys() and len(found) > 0
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)


def test_memory_budget_reaches_the_loss() -> None:
    model = logitless.patch(make("llama"), memory_budget="1B")
    ids, labels = batch()
    with pytest.raises(ValueError, match="memory_budget: 1 bytes"):
        model(ids, labels=labels)


def test_compiled_model() -> None:
    model = make("llama")
    original = copy.deepcopy(model)
    logitless.patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, labels = batch()
    expected_loss, expected = gradients(original, lambda m: m(ids, labels=labels).loss)
    before = calls()
    loss, _ = gradients(model, lambda m: compiled(ids, labels=labels).loss)
    assert calls() > before and loss == pytest.approx(expected_loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_activation_checkpointing() -> None:
    model = make("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    original = copy.deepcopy(model)
    logitless.patch(model)
    ids, labels = batch()
    assert_same(model, original, lambda m: m(ids, labels=labels).loss)


FSDP2 = """
import os, sys, copy, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import logitless, test_huggingface as tests

rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
ids, labels = tests.batch(4, 9)
mine = slice(2 * rank, 2 * rank + 2)
for family in ("llama", "qwen3"):  # a head of its own and a tied one
    model = tests.make(family).eval()
    dense = copy.deepcopy(model)
    logitless.patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = tests.calls()
    model(ids[mine], labels=labels[mine], num_items_in_batch=torch.tensor(10)).loss.backward()
    assert tests.calls() == before + 1
    (dense(ids, labels=labels, num_items_in_batch=10).loss / 2).backward()
    for one, other in zip(model.parameters(), dense.parameters()):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)
dist.barrier()
dist.destroy_process_group()
print("equal")
"""


def test_fully_shard_on_two_ranks(tmp_path: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = tmp_path / "fsdp2.py"
    script.write_text(FSDP2)
    here = str(pathlib.Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for each in ranks:
            output, errors = each.communicate(timeout=300)
            assert output.strip().endswith("equal") and each.returncode == 0, errors[-3000:]
    finally:
        for each in ranks:
            each.kill()


def test_accelerates_autocast_comes_and_goes() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make("llama")
    original = copy.deepcopy(model)
    ids, labels = batch()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared, other = accelerator.prepare(logitless.patch(model)), accelerator.prepare(original)
    assert_same(prepared, other, lambda m: m(ids, labels=labels).loss, eps=torch.finfo(torch.bfloat16).eps / 8)
    back = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    before = calls()
    back(ids, labels=labels)
    assert back is model and calls() == before + 1


def test_two_threads_in_one_model_are_refused() -> None:
    model = logitless.patch(make("llama"))
    ids, labels = batch()
    inside, second = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if not inside.is_set():  # the first call waits in the middle of its forward for the second to end
            inside.set()
            assert second.wait(60)

    model.model.norm.register_forward_hook(wait)
    losses: list[float] = []
    first = threading.Thread(target=lambda: losses.append(model(ids, labels=labels).loss.item()))
    first.start()
    assert inside.wait(60)
    with pytest.raises(UnsupportedModel, match="DistributedDataParallel"):
        model(ids[:1], labels=labels[:1])
    second.set()
    first.join(60)
    assert losses == [model(ids, labels=labels).loss.item()]


# Refusals


class InventedScale(transformers.LlamaForCausalLM):
    """Multiplies its logits by 3 and tells nobody."""

    def head(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 3.0

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):  # type: ignore[no-untyped-def]
        output = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        output.logits = self.head(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size, **kwargs)
        return output


class InventedSmallScale(InventedScale):
    """Less than what bfloat16 may do to one logit; over all of them it shows."""

    def head(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * 1.03


class InventedCap(InventedScale):
    """A softcap far above this model's logits: at its own size no logit shows it."""

    def head(self, logits: torch.Tensor) -> torch.Tensor:
        return 500.0 * torch.tanh(logits / 500.0)


class InventedShift(InventedScale):
    """Lowers one class."""

    def head(self, logits: torch.Tensor) -> torch.Tensor:
        return logits - 2.0 * (torch.arange(logits.shape[-1]) == 17)


class InventedLoss(transformers.LlamaForCausalLM):
    """Adds a z-loss of its own."""

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):  # type: ignore[no-untyped-def]
        output = super().forward(input_ids=input_ids, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 1e-3 * output.logits.logsumexp(-1).square().mean()
        return output


class InventedHead(InventedScale):
    """Projects without its head."""

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):  # type: ignore[no-untyped-def]
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state + 1.0
        logits = hidden @ self.lm_head.weight.T
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize(
    ("cls", "text"),
    [
        (InventedScale, r"logit_scale 1: ratio 3\. .*logit_scale=r"),
        (InventedCap, r"logit_scale 1: ratio (1|0\.99999)"),
        (InventedShift, r"logit_scale 1: ratio"),
        (InventedHead, r"calls get_output_embeddings\(\) 0 times"),
        (InventedLoss, r"loss .* of the original forward, .* patched .*ratio 1\.0"),
    ],
)
def test_an_unknown_transform_is_refused_with_its_ratio(cls: Any, text: str) -> None:
    torch.manual_seed(3)
    model = cls(transformers.LlamaConfig(**COMMON))
    with pytest.raises(UnsupportedModel, match=text):
        logitless.patch(model)
    assert "forward" not in model.__dict__ and not model.lm_head._forward_pre_hooks  # nothing is left behind


def test_a_small_scale_shows_in_sixteen_bits_too() -> None:
    torch.manual_seed(3)
    model = InventedSmallScale(transformers.LlamaConfig(**COMMON)).bfloat16()
    with pytest.raises(UnsupportedModel, match=r"logit_scale 1: ratio 1\.0(29|30|31)"):
        logitless.patch(model)
    assert logitless.patch(model, logit_scale=1.03)._logitless.transform == (1.03, None)


def test_a_loss_whose_labels_are_not_shifted_is_refused() -> None:
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        is_encoder_decoder=False,
    )
    with pytest.raises(UnsupportedModel, match="shifted by one"):
        logitless.patch(transformers.BartForCausalLM(config))


def test_a_transform_that_the_caller_knows() -> None:
    torch.manual_seed(3)
    ids, labels = batch()
    for cls, known in ((InventedScale, {"logit_scale": 3.0}), (InventedCap, {"softcap": 500.0})):
        model = cls(transformers.LlamaConfig(**COMMON)).train()
        original = copy.deepcopy(model)
        with pytest.raises(UnsupportedModel, match="ratio"):
            logitless.patch(model, logit_scale=2.0)
        logitless.patch(model, **known)
        assert_same(model, original, lambda m: m(ids, labels=labels).loss)


def test_a_configuration_that_tells_another_scale_is_refused() -> None:
    model = make("granite")
    model.config.logits_scaling = 2.0
    logitless.unpatch(logitless.patch(model))  # forward reads it too
    model = make("llama")
    model.config.final_logit_softcapping = 0.01  # Llama's forward does not
    assert logitless.patch(model)._logitless.transform == (1.0, None)


def test_heads_that_are_not_a_plain_matrix_are_refused() -> None:
    class Quantised(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    ids, labels = batch()
    model = make("llama")
    model.lm_head = Quantised(32, VOCAB, bias=False)
    with pytest.raises(UnsupportedModel, match="lm_head: Quantised.*quantised head"):
        logitless.patch(model)
    model = logitless.patch(make("llama"))
    model.lm_head = Quantised(32, VOCAB, bias=False)
    with pytest.raises(UnsupportedModel, match="lm_head: Quantised"):  # also when it comes later
        model(ids, labels=labels)
    model = make("llama")
    model.lm_head.weight.data.zero_()
    with pytest.raises(UnsupportedModel, match="all 0"):
        logitless.patch(model)
    model = make("llama")
    model.lm_head.weight.ds_id = 0  # DeepSpeed's mark on a partitioned weight
    with pytest.raises(UnsupportedModel, match="ZeRO-3"):
        logitless.patch(model)
    with pytest.raises(ValueError, match="on_empty: 'never'"):
        logitless.patch(make("llama"), on_empty="never")


def test_lora_beside_the_head_works_and_on_the_head_is_refused() -> None:
    peft = pytest.importorskip("peft")
    ids, labels = batch()
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(make("llama"), config)
    original = copy.deepcopy(adapted)
    assert logitless.patch(adapted) is adapted
    assert_same(adapted, original, lambda m: m(input_ids=ids, labels=labels).loss)
    # Patched first, adapted later.
    later = logitless.patch(make("llama"))
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    later = peft.get_peft_model(later, config)
    later.load_state_dict(original.state_dict())
    assert_same(later, original, lambda m: m(input_ids=ids, labels=labels).loss)
    for settings in ({"target_modules": ["lm_head"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
        with pytest.raises(UnsupportedModel, match="adapter .LoRA"):
            logitless.patch(peft.get_peft_model(make("llama"), peft.LoraConfig(**settings)))
        late = peft.get_peft_model(logitless.patch(make("llama")), peft.LoraConfig(**settings))
        with pytest.raises(UnsupportedModel, match="adapter .LoRA"):
            late(input_ids=ids, labels=labels)


def test_models_and_wrappers_that_are_refused() -> None:
    model = make("llama")
    with pytest.raises(UnsupportedModel, match="before torch.compile"):
        logitless.patch(torch.compile(model))
    with pytest.raises(UnsupportedModel, match="before a data-parallel"):
        logitless.patch(torch.nn.DataParallel(copy.deepcopy(model)))
    with pytest.raises(UnsupportedModel, match="patched already"):
        logitless.patch(logitless.patch(model))
    with pytest.raises(UnsupportedModel, match="must be a transformers model"):
        logitless.patch(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModel, match="no labels"):
        logitless.patch(make("llama").model)
    t5 = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        logitless.patch(transformers.T5ForConditionalGeneration(t5))
    bert = transformers.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UnsupportedModel, match="ForMaskedLMLoss"):
        logitless.patch(transformers.BertForMaskedLM(bert))
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON))
    with pytest.raises(UnsupportedModel, match="meta device"):
        logitless.patch(empty)
    other = make("llama")
    other.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(UnsupportedModel, match="loss_function is <lambda>"):
        logitless.patch(other)
    later = logitless.patch(make("llama"))
    later.loss_function = other.loss_function
    with pytest.raises(UnsupportedModel, match="loss_function is <lambda>"):
        later(*batch()[:1], labels=batch()[1])


def test_training_without_labels_warns_once() -> None:
    model = logitless.patch(make("llama"))
    ids, _ = batch()
    with pytest.warns(UserWarning, match="trained without labels"):
        model(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
        with torch.no_grad():
            logitless.patch(make("llama"))(ids)


# Trainer


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of one length with very different counts of labels; `empty` has none at all."""

    def __init__(self, empty: bool = False) -> None:
        self.ids, _ = batch(16, 12)
        self.labels = self.ids.clone()
        for row in range(16):
            self.labels[row, : (row * 5) % 11] = -100
        if empty:
            self.labels[4:6] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


def trainer(model: Any, folder: Any, empty: bool = False, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=4,
        learning_rate=1e-2,
        optim="sgd",  # AdamW divides by gradients' sizes and would blow rounding up
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **more,
    )
    # Order matters for the comparison only in that it is the same; the dataset gives it.
    return transformers.Trainer(model=model, args=arguments, train_dataset=Rows(empty), eval_dataset=Rows(empty))


@pytest.mark.parametrize("empty", [False, True], ids=["", "one micro-batch without labels"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_trainer_with_gradient_accumulation_equals_the_original(family: str, empty: bool, tmp_path: Any) -> None:
    model = make(family)
    original = copy.deepcopy(model)
    before = calls()
    expected = trainer(original, tmp_path, empty)
    expected.train()
    assert calls() == before
    found = trainer(model, tmp_path, empty)
    assert logitless.patch(found) is found and found.model_accepts_loss_kwargs
    before = calls()
    found.train()
    assert calls() == before + 16  # 4 steps of 4 micro-batches
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 4
    for (name, one), (_, other) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)
    assert found.evaluate()["eval_loss"] == pytest.approx(expected.evaluate()["eval_loss"], rel=1e-5)


def test_trainer_options_that_need_logits_are_refused(tmp_path: Any) -> None:
    smoothing = trainer(make("llama"), tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(UnsupportedModel, match="label_smoothing_factor"):
        logitless.patch(smoothing)
    logitless.patch(smoothing.model)  # behind the trainer's back: said at the first step
    with pytest.raises(UnsupportedModel, match="label_smoothing_factor"):
        smoothing.train()
    function = trainer(make("llama"), tmp_path)
    function.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
    with pytest.raises(UnsupportedModel, match="compute_loss_func"):
        logitless.patch(function)


def test_trainer_evaluation_that_reads_logits(tmp_path: Any) -> None:
    evaluation = trainer(make("llama"), tmp_path)
    evaluation.compute_metrics = lambda prediction: {"size": float(prediction.predictions.shape[-1])}
    with pytest.raises(UnsupportedModel, match="eval_logits=True"):
        logitless.patch(evaluation)
    logitless.patch(evaluation.model)  # behind the trainer's back
    with pytest.raises(TypeError, match=r"no logits: logitless.patch\(model, eval_logits=True\)"):
        evaluation.evaluate()
    logitless.unpatch(evaluation)
    logitless.patch(evaluation, eval_logits=True)
    assert evaluation.evaluate()["eval_size"] == VOCAB
