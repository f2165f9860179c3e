"""Learned attention sinks (gpt-oss): windows beside states have them."""

from __future__ import annotations

from typing import Any

import torch

from deltanet_hf.mixers.cache.sinks_apart import with_learned_sinks
from support.tiny_models import tiny_student, tiny_teacher

IDS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_window_that_sees_all_is_the_teachers_attention() -> None:
    """Every layer: those with the family's own window, too."""
    teacher: Any = tiny_teacher("gpt_oss")
    student: Any = tiny_student("gpt_oss", mixer="gated_deltanet+window", window=64, state_dtype="float32")
    copied = {name.replace(".sinks", ".window_branch.learned_sinks"): x for name, x in teacher.state_dict().items()}
    missing, unexpected = student.load_state_dict(copied, strict=False)
    assert not unexpected
    assert not [name for name in missing if "sinks" in name]
    torch.testing.assert_close(student(IDS).logits, teacher(IDS).logits, rtol=1e-4, atol=1e-4)
    for layer in student.model.layers:
        layer.self_attn.window_branch.learned_sinks += 1.0
    assert (student(IDS).logits - teacher(IDS).logits).abs().max() > 0.1


def test_sinks_are_a_further_score_without_a_value() -> None:
    scores, values, sinks = torch.randn(5, 3, 7), torch.randn(7, 4), torch.randn(3)
    output, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    more = torch.cat([scores, sinks[:, None].expand(5, 3, 1)], dim=-1)
    found, total = with_learned_sinks(output, lse, sinks)
    torch.testing.assert_close(found, more.softmax(-1)[..., :7] @ values)
    torch.testing.assert_close(total, more.logsumexp(-1))
