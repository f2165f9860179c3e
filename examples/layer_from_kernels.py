"""A Gated DeltaNet layer from the operators alone, trained to recall pairs, then run token by token.

    python examples/layer_from_kernels.py [STEPS]

A sequence holds pairs of a key and a value, then the keys again; the layer has to name their values.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltanet_kernels import causal_conv1d, chunk_gated_delta_rule, gated_rms_norm

PAIRS, KEYS, VALUES, HIDDEN, HEADS = 8, 32, 16, 64, 2
State = tuple[Tensor, Tensor]


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet with `heads` states of D x D, where D = hidden / heads."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.qkv, self.gate, self.out = (nn.Linear(hidden, n * hidden, bias=False) for n in (3, 1, 1))
        self.conv = nn.Parameter(torch.randn(3 * hidden, 4) / 2)
        self.decay, self.strength = nn.Linear(hidden, heads), nn.Linear(hidden, heads)
        self.norm = nn.Parameter(torch.ones(self.head_dim))

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """x [B, T, hidden] -> y [B, T, hidden], and the state: the convolution's last inputs, and S [B, H, D, D]."""
        tail, memory = state or (None, None)
        convolved, tail = causal_conv1d(
            self.qkv(x), self.conv, activation="silu", initial_state=tail, output_final_state=True
        )
        q, k, v = convolved.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        o, memory = chunk_gated_delta_rule(
            q, k, v, F.logsigmoid(self.decay(x) + 4), self.strength(x).sigmoid(),
            initial_state=memory, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        gate = self.gate(x).unflatten(-1, (self.heads, self.head_dim))
        return self.out(gated_rms_norm(o, gate, self.norm).flatten(2)), (tail, memory)


def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences [rows, 3 PAIRS] of tokens, and the values [rows, PAIRS] of the keys at their ends."""
    keys = torch.stack([torch.randperm(KEYS, generator=generator)[:PAIRS] for _ in range(rows)])
    values = torch.randint(VALUES, (rows, PAIRS), generator=generator)
    pairs = torch.stack([keys, KEYS + values], dim=-1).flatten(1)
    order = torch.stack([torch.randperm(PAIRS, generator=generator) for _ in range(rows)])
    return torch.cat([pairs, keys.gather(1, order)], dim=1), values.gather(1, order)


def main(steps: int) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    embedding, layer = nn.Embedding(KEYS + VALUES, HIDDEN), GatedDeltaNet(HIDDEN, HEADS)
    head = nn.Linear(HIDDEN, VALUES)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *layer.parameters(), *head.parameters()], lr=3e-3)
    for step in range(steps):
        tokens, values = batch(64, generator)
        logits = head(layer(embedding(tokens))[0][:, -PAIRS:])
        loss = F.cross_entropy(logits.flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            right = (logits.argmax(-1) == values).float().mean()
            print(f"step {step}: loss {loss:.3f}, {right:.0%} of the values recalled (chance {1 / VALUES:.0%})")
    with torch.no_grad():
        x, state, parts = embedding(batch(2, generator)[0]), None, []
        for token in x.split(1, dim=1):
            y, state = layer(token, state)
            parts.append(y)
        difference = (torch.cat(parts, dim=1) - layer(x)[0]).abs().max()
    print(f"token by token and all at once differ by {difference:.0e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
