"""A policy learns by GRPO from log-probabilities and entropies that never were logits [B, T, V].

    python examples/python/grpo.py

Groups of completions are sampled from a tiny policy and rewarded for words of one kind (half the vocabulary; as in a
trained model, words of a kind lie near each other in the head); advantages are rewards less their group's mean, over
their group's deviation. Each batch is used twice, so that the second time
the ratio to the sampling policy is not 1 and clipping and the KL term to the frozen first policy have work. The
objective is written down twice:

    from token_logprobs(hidden, weight, target, return_entropy=True) and a few lines of PyTorch, any objective you like
    policy_loss(hidden, weight, target, old_logprob, advantage, ...), one call, gradients made with the loss

The table shows both losses, how far their gradients are apart, and the reward as it rises. Training takes the second.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import logitless

CLIP, KL, ENTROPY = 0.2, 0.02, 1e-4


class Policy(nn.Module):
    """Embedding, GRU, head; forward gives hidden states [B, T, H], not logits."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(vocab, hidden), nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab, bias=False)
        with torch.no_grad():
            self.head.weight += 0.2 * torch.randn(2, hidden).repeat(vocab // 2 + 1, 1)[:vocab]  # two kinds of words

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.embed(tokens))[0]
        return hidden

    @torch.no_grad()
    def sample(self, first: Tensor, length: int) -> Tensor:
        """[B, 1 + length] tokens; logits of one position at a time."""
        tokens, state = [first[:, None]], None
        for _ in range(length):
            hidden, state = self.body(self.embed(tokens[-1]), state)
            tokens.append(torch.multinomial(self.head(hidden[:, -1]).softmax(-1), 1))
        return torch.cat(tokens, 1)


def by_hand(policy: Policy, tokens: Tensor, old: Tensor, advantage: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and mean entropy, from per-token log-probabilities and entropies: one backward serves both."""
    logprob, entropy = logitless.token_logprobs(
        policy(tokens[:, :-1]), policy.head.weight, tokens[:, 1:], return_entropy=True
    )
    ratio = (logprob - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    away = reference - logprob
    loss = -gain + KL * (away.exp() - away - 1) - ENTROPY * entropy
    return loss.mean(), entropy.mean()


def one_call(policy: Policy, tokens: Tensor, old: Tensor, advantage: Tensor, reference: Tensor) -> Tensor:
    """The same loss by the library's own rule."""
    loss: Tensor = logitless.policy_loss(
        policy(tokens[:, :-1]),
        policy.head.weight,
        tokens[:, 1:],
        old,
        advantage.expand_as(old),
        clip_low=CLIP,
        clip_high=CLIP,
        ref_logprob=reference,
        kl_coef=KL,
        entropy_coef=ENTROPY,
    )
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=15, help="batches of completions")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=2e-2)
    options = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy(options.hidden, options.vocab)
    frozen = Policy(options.hidden, options.vocab)
    frozen.load_state_dict(policy.state_dict())
    optimizer = torch.optim.Adam(policy.parameters(), lr=options.lr)
    wanted = torch.arange(options.vocab) % 2 == 0

    rows = options.prompts * options.group * options.length
    print(f"R {rows} tokens a batch, H {options.hidden}, V {options.vocab}")
    print(f"{'batch':>5}{'reward':>9}{'entropy':>9}{'by hand':>12}{'policy_loss':>13}{'gradients apart':>17}")
    rewards, apart, seconds = [], [], {"by hand": [0.0], "policy_loss": [0.0]}
    for step in range(1, options.steps + 1):
        first = torch.randint(0, options.vocab, (options.prompts,)).repeat_interleave(options.group)
        tokens = policy.sample(first, options.length)
        reward = wanted[tokens[:, 1:]].float().mean(1).reshape(options.prompts, options.group)
        centred = reward - reward.mean(1, keepdim=True)
        advantage = (centred / (reward.std(1, keepdim=True) + 1e-4)).reshape(-1, 1)
        with torch.no_grad():
            old = logitless.token_logprobs(policy(tokens[:, :-1]), policy.head.weight, tokens[:, 1:])
            reference = logitless.token_logprobs(frozen(tokens[:, :-1]), frozen.head.weight, tokens[:, 1:])
        for _ in range(2):
            begin = time.perf_counter()
            loss, entropy = by_hand(policy, tokens, old, advantage, reference)
            theirs = torch.autograd.grad(loss, list(policy.parameters()))
            seconds["by hand"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            same = one_call(policy, tokens, old, advantage, reference)
            optimizer.zero_grad()
            same.backward()
            seconds["policy_loss"].append(time.perf_counter() - begin)
            wide = torch.cat([gradient.flatten() for gradient in theirs])
            mine = torch.cat([torch.zeros(0) if p.grad is None else p.grad.flatten() for p in policy.parameters()])
            apart.append(((mine - wide).norm() / wide.norm()).item())
            optimizer.step()
        rewards.append(reward.mean().item())
        print(f"{step:5}{rewards[-1]:9.3f}{entropy.item():9.3f}{loss.item():12.6f}{same.item():13.6f}{apart[-1]:17.1e}")
    print(f"reward: {rewards[0]:.3f} in the first batch, {statistics.fmean(rewards[-3:]):.3f} in the last three")
    print(f"gradients apart, at most: {max(apart):.1e} of their norm")
    for name, times in seconds.items():
        print(f"seconds of a step, {name}: {statistics.median(times[1:]):.4f} (median)")
    print(f"operators of Logitless that ran: {logitless.op_calls()}")


if __name__ == "__main__":
    main()
