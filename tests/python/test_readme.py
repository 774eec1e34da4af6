"""The README's Python, as it stands there (tools/check_examples.py compares)."""

import torch
import transformers

import logitless


def test_readme():
    config = transformers.LlamaConfig(
        vocab_size=211,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    lm_head = model.lm_head
    labels = torch.randint(0, 211, (2, 17))
    hidden = model.model(input_ids=labels).last_hidden_state
    before = logitless.op_calls()["forward_backward"]

    # region: python
    loss = logitless.linear_cross_entropy(hidden, lm_head.weight, labels, shift=True, memory_budget="64MiB")
    loss.backward()

    logitless.patch(model)  # a causal language model of transformers: its loss no longer makes logits
    model(input_ids=labels, labels=labels).loss.backward()
    # endregion: python

    assert logitless.op_calls()["forward_backward"] >= before + 2
    assert torch.isfinite(lm_head.weight.grad).all()
