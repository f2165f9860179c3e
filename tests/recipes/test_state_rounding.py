"""The simulation of rounded states: what is rounded less often is off by less."""

from __future__ import annotations

import torch

from measuring.study.state_rounding import ROUNDINGS, errors, to_8_bits


def test_rows_have_255_steps_and_stochastic_rounding_has_no_bias() -> None:
    torch.manual_seed(0)
    row = torch.randn(1, 64, dtype=torch.float64)
    step = row.abs().max() / 127
    assert (to_8_bits(row) - row).abs().max() <= step / 2
    mean = to_8_bits(row.expand(4000, 64), stochastic=True).mean(0)
    torch.testing.assert_close(mean, row[0], rtol=0, atol=0.05 * float(step))


def test_a_state_that_is_rounded_less_often_is_off_by_less() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(256, 2, 16, dtype=torch.float64, generator=generator) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    found = dict(zip(ROUNDINGS, errors(q, k, v, half_life=100.0, beta=0.5), strict=True))
    assert found["8 bits, every 32 tokens"] < found["8 bits, every 8 tokens"] < found["8 bits"]
    assert 0 < found["bfloat16"] < found["8 bits"] < found["8 bits, stochastic"] < 1
