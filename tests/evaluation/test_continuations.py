"""Batched log-likelihoods equal those of lm-eval's own loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from deltanet_hf.evaluation.measures.continuations import TokenRequest
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM

REQUESTS = [
    ("The cat sat on the", " mat"),
    ("The cat sat on the", " moon and sang"),
    ("", "Alone"),
    ("A trailing space ", "moves"),
    ("Same input", "s"),
    ("Same input", "t"),
    ("x" * 60, "y"),
]


def scores(lm: HFLM) -> list[tuple[float, bool]]:
    return lm.loglikelihood([SimpleNamespace(args=pair, task_name="t") for pair in REQUESTS], disable_tqdm=True)


@pytest.mark.parametrize(("fixture", "max_length"), [("teacher_folder", 20), ("student_folder", None)])
def test_equals_the_stock_model(fixture: str, max_length: int | None, request: pytest.FixtureRequest) -> None:
    folder = str(request.getfixturevalue(fixture))
    common = {"pretrained": folder, "device": "cpu", "max_length": max_length}
    stock = scores(HFLM(**common, softmax_dtype="float32", batch_size=1))
    for batch_size in ("auto", 3):
        ours = scores(DeltaNetLM(**common, batch_size=batch_size))
        assert [s for s, _ in ours] == pytest.approx([s for s, _ in stock], abs=2e-4)
        assert [g for _, g in ours] == [g for _, g in stock]


def test_greedy_flag_is_true_for_the_greedy_continuation(teacher_folder: Path) -> None:
    lm = DeltaNetLM(str(teacher_folder), device="cpu", batch_size="auto")
    context = lm.tok_encode("The cat")
    with torch.no_grad():
        best = int(lm.model(torch.tensor([context])).logits[0, -1].argmax())
    other = (best + 1) % 200
    answers = lm.score_tokens([(None, context, [best]), (None, context, [other])])
    assert [greedy for _, greedy in answers] == [True, False]
    assert answers[0][0] > answers[1][0]


def test_rerun_gives_the_same_bits(student_folder: Path) -> None:
    lm = DeltaNetLM(str(student_folder), device="cpu", batch_size="auto")
    assert scores(lm) == scores(lm)


def test_window_changes_long_contexts_only(teacher_folder: Path) -> None:
    plain = scores(DeltaNetLM(str(teacher_folder), device="cpu", batch_size="auto"))
    windowed = scores(DeltaNetLM(str(teacher_folder), device="cpu", batch_size="auto", window=16, sinks=0))
    assert windowed[2] == pytest.approx(plain[2])
    assert windowed[1][0] != pytest.approx(plain[1][0], abs=1e-3)


def test_requests_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4 continuation tokens"):
        TokenRequest.truncated([1], [1] * 5, 4)


def test_requests_that_are_cut_are_counted(teacher_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of which the model reads the end only, as `hf` says of each."""
    lm = DeltaNetLM(str(teacher_folder), device="cpu", batch_size="auto", max_length=8)
    lm.score_tokens([(None, [5] * length, [6, 7]) for length in (6, 7, 8, 9)])
    assert "2 of 4 requests are longer than the model's 8 tokens and lose their beginning" in caplog.text
