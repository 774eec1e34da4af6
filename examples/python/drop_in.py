"""The drop-in: one line of a training step changes, loss and gradients stay, the logits [B, T, V] go.

    python examples/python/drop_in.py

Prints the loss, the largest relative difference of a gradient, and the bytes of workspace that the plan takes beside
the bytes of the logits that it replaces.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

import logitless


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--budget", default="16MiB")
    options = parser.parse_args()
    B, T, H, V = options.batch, options.length, options.hidden, options.vocab

    torch.manual_seed(0)
    embed, head = torch.nn.Embedding(V, H), torch.nn.Linear(H, V, bias=False)
    body = torch.nn.GRU(H, H, batch_first=True)
    tokens = torch.randint(0, V, (B, T))

    def before() -> torch.Tensor:
        hidden, _ = body(embed(tokens))
        logits = head(hidden)  # [B, T, V]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def after() -> torch.Tensor:
        hidden, _ = body(embed(tokens))
        loss: torch.Tensor = logitless.linear_cross_entropy(
            hidden, head.weight, tokens, shift=True, memory_budget=options.budget
        )
        return loss

    parameters: dict[str, torch.Tensor] = {
        "embedding": embed.weight,
        "head": head.weight,
        "body": next(body.parameters()),
    }
    dense, ours = before(), after()
    theirs = torch.autograd.grad(dense, list(parameters.values()))
    mine = torch.autograd.grad(ours, list(parameters.values()))

    print(f"B {B}, T {T}, H {H}, V {V}, float32")
    print(f"loss        before {dense.item():.6f}   after {ours.item():.6f}")
    for name, a, b in zip(parameters, mine, theirs, strict=True):
        print(f"gradient    {name:10} differs by {((a - b).norm() / b.norm()).item():.1e} of its norm")
    threads = torch.get_num_threads()
    plan = logitless.plan(B * T, H, V, dtype="float32", threads=threads, memory_budget=options.budget)
    logits, workspace = B * T * V * 4 / 2**20, plan.workspace_bytes / 2**20
    print(f"logits      before {logits:.1f} MiB   after none, and {workspace:.1f} MiB of workspace")
    print(f"operators of Logitless that ran: {sum(logitless.op_calls().values())}")


if __name__ == "__main__":
    main()
