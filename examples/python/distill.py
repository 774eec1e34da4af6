"""A student of a quarter of the width learns from a teacher's head, without the logits of either.

    python examples/python/distill.py

A teacher (three words of context, one hidden layer, a head) is trained on words by linear_cross_entropy. Two equal
students follow: one learns from the text alone, one by distillation_loss(student's hidden, head, teacher's hidden,
head): the forward KL from the teacher's distribution, half and half with the text (hard_share). Both see the same
batches. The table gives, on words that none has seen, the perplexity and the KL from the teacher, whoever won.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn
from words import read_words

import logitless

CONTEXT = 3


class Model(nn.Module):
    """Words [R, 3] to hidden states [R, H]; the head is only a weight to the losses."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(vocab, hidden), nn.Linear(CONTEXT * hidden, hidden)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, words: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.embed(words).flatten(1)))


def hard_loss(model: Model, words: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the text."""
    loss: Tensor = logitless.linear_cross_entropy(model(words), model.head.weight, targets, linear_bias=model.head.bias)
    return loss


def soft_loss(model: Model, teacher: Model, words: Tensor, targets: Tensor, hard_share: float) -> Tensor:
    """hard_share of the text's cross-entropy, the rest KL(teacher | student)."""
    with torch.no_grad():
        told = teacher(words)
    loss: Tensor = logitless.distillation_loss(
        model(words),
        model.head.weight,
        told,
        teacher.head.weight,
        bias=model.head.bias,
        teacher_bias=teacher.head.bias,
        target=targets,
        hard_share=hard_share,
    )
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--text", help="file or folder (default: the novels of ./run, or this repository's own text)")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=96, help="the teacher's width; students have a quarter")
    parser.add_argument("--teacher-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=100, help="of each student")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--hard-share", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args()
    torch.manual_seed(0)
    words, names, source = read_words(options.text, options.vocab)
    ids = torch.tensor(words)
    windows = ids.unfold(0, CONTEXT + 1, 1)
    held = len(windows) // 10
    seen, unseen = windows[: len(windows) - held - CONTEXT], windows[-min(held, 2048) :]
    vocab = len(names)
    print(f"text: {source}, {len(words)} words, vocabulary {vocab}")

    def fit(model: Model, steps: int, teacher: Model | None) -> float:
        generator = torch.Generator().manual_seed(1)  # the same batches for each student
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
        begin = time.perf_counter()
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = options.lr * (1 - step / steps)
            rows = seen[torch.randint(0, len(seen), (options.rows,), generator=generator)]
            context, targets = rows[:, :CONTEXT], rows[:, CONTEXT]
            if teacher is None:
                loss = hard_loss(model, context, targets)
            else:
                loss = soft_loss(model, teacher, context, targets, options.hard_share)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begin

    @torch.no_grad()
    def judge(model: Model) -> tuple[float, float]:
        """Perplexity and KL from the teacher on the unseen words."""
        context, targets = unseen[:, :CONTEXT], unseen[:, CONTEXT]
        return math.exp(hard_loss(model, context, targets)), soft_loss(model, teacher, context, targets, 0.0).item()

    teacher = Model(options.hidden, vocab)
    student = Model(options.hidden // 4, vocab)
    alone = Model(options.hidden // 4, vocab)
    alone.load_state_dict(student.state_dict())
    models = {"teacher": teacher, "student, text alone": alone, "student, distilled": student}
    print(f"\n{'':22}{'H':>5}{'steps':>7}{'seconds':>9}{'perplexity':>12}{'KL from teacher':>17}")
    perplexity, divergence = judge(student)
    print(f"{'student, untrained':22}{options.hidden // 4:5}{0:7}{0.0:9.1f}{perplexity:12.1f}{'':>17}")
    for name, model in models.items():
        steps = options.teacher_steps if model is teacher else options.steps
        seconds = fit(model, steps, teacher if model is student else None)
        perplexity, divergence = judge(model)
        width = model.head.in_features
        print(f"{name:22}{width:5}{steps:7}{seconds:9.1f}{perplexity:12.1f}{divergence:17.4f}")
    print(f"\noperators of Logitless that ran: {logitless.op_calls()}")


if __name__ == "__main__":
    main()
