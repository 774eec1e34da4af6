"""logitless.integrations.trl: TRL's own fused head and trainers on Logitless' kernel, against TRL's kernel.

Both sides run TRL's code; only the kernel differs. logitless.op_calls() says which one ran.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any

import logitless
import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are made here; nothing is fetched
trl = pytest.importorskip("trl", exc_type=ImportError)
transformers = pytest.importorskip("transformers")
import trl.kernels.chunked_logprob as kernel  # noqa: E402
import trl.trainer.utils as utils  # noqa: E402
from logitless.integrations import trl as logitless_trl  # noqa: E402

VOCAB = 300
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only wait for other threads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    logitless_trl.unpatch()


def calls() -> int:
    """How often an operator of a forward pass ran."""
    counted = logitless.op_calls()
    return counted["forward"] + counted["forward_backward"]


def make(**more: Any) -> Any:
    """A tiny random model in training mode."""
    torch.manual_seed(3)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**settings, **more})).train()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [3, 9]; the last row has no label at all."""
    ids = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(7))
    labels = ids.clone()
    labels[0, :5] = -100
    labels[2] = -100
    return ids, labels


def test_kernel_equals_trls_in_values_and_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*s, generator=generator) for s in ((17, 24), (VOCAB, 24), (VOCAB,)))
    targets = torch.randint(0, VOCAB, (17,), generator=generator)
    targets[:4] = (hidden[:4] @ weight.T + bias).argmax(-1)  # some that are the most likely token
    upstream = torch.randn(2, 17, generator=generator)
    for softcap, scale, temperature in ((None, 1.0, 1.0), (5.0, 0.5, 0.7)):
        results = []
        for function in (kernel.ChunkedLogProbFunction, logitless_trl._Head):
            leaves = [each.clone().requires_grad_() for each in (hidden, weight, bias)]
            before = calls()
            values = function.apply(*leaves, targets, temperature, 64, softcap, scale, OUTPUTS)
            assert calls() == before + (function is logitless_trl._Head)
            ((values[0] * upstream[0]).sum() + (values[1] * upstream[1]).sum()).backward()
            results.append(([value.detach() for value in values], [leaf.grad for leaf in leaves]))
        (expected, expected_gradients), (found, gradients) = results
        assert bool(found[4][:4].any()) and not bool(found[4].all())
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for one, other in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_outputs_that_nobody_asked_for_are_none() -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(20, 8)
    targets = torch.tensor([0, 1, 2, 3])
    assert [
        value is None for value in logitless_trl._Head.apply(hidden, weight, None, targets, 1.0, 64, None, 1.0, ())
    ] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_a_partitioned_head_is_refused() -> None:
    weight = torch.nn.Parameter(torch.randn(20, 8))
    weight.ds_id = 0  # DeepSpeed's mark
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        logitless_trl._Head.apply(torch.randn(4, 8), weight, None, torch.tensor([0, 1, 2, 3]), 1.0, 64)


def test_ties_are_the_first_argmax_as_in_trl() -> None:
    hidden, weight = torch.ones(2, 4), torch.ones(9, 4)
    arguments = (hidden, weight, None, torch.tensor([0, 3]), 1.0, 64, None, 1.0, OUTPUTS)
    expected, found = kernel.ChunkedLogProbFunction.apply(*arguments)[4], logitless_trl._Head.apply(*arguments)[4]
    assert expected.tolist() == found.tolist() == [True, False]


@pytest.mark.parametrize("more", [{}, {"shift": True}, {"num_items_in_batch": 7}], ids=str)
def test_fused_head_of_a_model(more: dict[str, Any]) -> None:
    ids, labels = batch()
    results = []
    more = dict(more)
    if more.pop("shift", False):
        more["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    for patched in (False, True):
        model = make(final_logit_softcapping=20.0)
        utils.add_fused_lm_head(model, temperature=0.8, outputs=OUTPUTS)
        if patched:
            logitless_trl.patch()  # also for heads that were added before
            logitless_trl.patch()  # twice is once
        before = calls()
        output = model(ids, labels=labels, fused_lm_head=True, **more)
        assert calls() == before + patched
        (output.loss + 0.1 * output.entropy.sum()).backward()
        results.append((output, {name: p.grad for name, p in model.named_parameters()}))
    (expected, expected_gradients), (found, gradients) = results
    for name in ("loss", "log_probs", *OUTPUTS, "label_mask"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_batch_without_labels_is_a_differentiable_zero() -> None:
    ids, labels = batch()
    logitless_trl.patch()
    model = make()
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    output = model(ids, labels=torch.full_like(labels, -100), fused_lm_head=True)
    output.loss.backward()
    assert float(output.loss) == 0.0
    assert all(p.grad is not None and float(p.grad.abs().max()) == 0.0 for p in model.parameters())


def test_fp32_head_over_a_bf16_model() -> None:
    ids, labels = batch()
    losses = []
    for patched in (False, True):
        model = make().bfloat16()
        utils.add_fused_lm_head(model, cast_lm_head_to_fp32=True)
        if patched:
            logitless_trl.patch()
        before = calls()
        output = model(ids, labels=labels, fused_lm_head=True)
        assert calls() == before + patched
        output.loss.backward()
        losses.append((float(output.loss.detach()), model.lm_head.weight.grad))
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    torch.testing.assert_close(losses[1][1], losses[0][1], rtol=2**-7, atol=2**-12)


def test_unpatch_gives_trls_kernel_back() -> None:
    before = (utils._ChunkedLogProbFunction, utils._use_triton)
    logitless_trl.patch()
    assert utils._ChunkedLogProbFunction is logitless_trl._Head
    logitless_trl.unpatch()
    assert (utils._ChunkedLogProbFunction, utils._use_triton) == before


def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = logitless_trl.importlib.metadata.version
    for version in ("1.15.2", "1.17.0", "2.0.0", "1.160.0"):
        monkeypatch.setattr(logitless_trl.importlib.metadata, "version", lambda name, version=version: version)
        with pytest.raises(ImportError, match=rf"TRL {version} is not known; known: 1\.16\.x"):
            logitless_trl.patch()
    monkeypatch.setattr(logitless_trl.importlib.metadata, "version", real)

    class Other:
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any) -> None: ...

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(ImportError, match="another head"):
        logitless_trl.patch()
    monkeypatch.undo()
    monkeypatch.setattr(kernel, "OPTIONAL_OUTPUTS", ("entropy",))
    with pytest.raises(ImportError, match="other outputs"):
        logitless_trl.patch()


def tokenizer() -> Any:
    """Words w0, w1, ... as tokens; no file is needed."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, VOCAB)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def words(*numbers: int) -> str:
    """A text of these tokens."""
    return " ".join(f"w{number}" for number in numbers)


def history(trainer: Any) -> list[dict[str, float]]:
    """What a training logs that the kernel decides."""
    keys = ("loss", "entropy", "mean_token_accuracy", "grad_norm", "logps/chosen", "logps/rejected")
    return [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history if "loss" in entry]


def compare(build: Any, at_least: int) -> None:
    """Trains with TRL's kernel and with Logitless' from the same start; logs and weights must agree."""
    model = make()
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    before = calls()
    expected = build(other)
    expected.train()
    assert calls() == before
    logitless_trl.patch()
    found = build(model)
    found.train()
    assert calls() >= before + at_least
    assert len(history(expected)) == 2 and "loss" in history(expected)[0]
    for one, two in zip(history(found), history(expected), strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6, msg=name)
    # What is compared is a training: the head moved by more than the tolerance.
    assert float((model.lm_head.weight - start.lm_head.weight).abs().max()) > 1e-4


def test_sft_trainer(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": words(5, 6 + i), "completion": " " + words(*range(10 + i, 16 + 2 * i))} for i in range(8)]

    def build(model: Any) -> Any:
        config = trl.SFTConfig(output_dir=str(tmp_path), max_length=32, **SETTINGS)
        return trl.SFTTrainer(
            model=model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer()
        )

    compare(build, 4)


def test_dpo_trainer(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"prompt": words(5, 6 + i), "chosen": " " + words(*range(10, 15 + i)), "rejected": " " + words(40 + i, 7, 8)}
        for i in range(8)
    ]

    def build(model: Any) -> Any:
        config = trl.DPOConfig(output_dir=str(tmp_path), max_length=32, **SETTINGS)
        return trl.DPOTrainer(
            model=model,
            ref_model=make(initializer_range=0.05),
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    compare(build, 8)


def test_grpo_trainer(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": words(5, 6 + i, 7)} for i in range(8)]

    def reward(completions: list[str], **more: Any) -> list[float]:
        return [float(len(set(text)) % 7) for text in completions]

    def build(model: Any) -> Any:
        config = trl.GRPOConfig(
            output_dir=str(tmp_path),
            num_generations=2,
            max_completion_length=6,
            seed=3,
            **SETTINGS,
        )
        return trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    compare(build, 4)


def test_kto_trainer(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"prompt": words(5, 6 + i), "completion": " " + words(*range(10 + i, 15 + 2 * i)), "label": i % 2 == 0}
        for i in range(8)
    ]

    def build(model: Any) -> Any:
        config = trl.KTOConfig(output_dir=str(tmp_path), max_length=32, **SETTINGS)
        return trl.KTOTrainer(
            model=model,
            ref_model=make(initializer_range=0.05),
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    compare(build, 8)


def test_rloo_trainer(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": words(5, 6 + i, 7)} for i in range(8)]

    def reward(completions: list[str], **more: Any) -> list[float]:
        return [float(len(set(text)) % 7) for text in completions]

    def build(model: Any) -> Any:
        config = trl.RLOOConfig(
            output_dir=str(tmp_path), num_generations=2, max_completion_length=6, beta=0.0, seed=3, **SETTINGS
        )
        return trl.RLOOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
        )

    compare(build, 4)
