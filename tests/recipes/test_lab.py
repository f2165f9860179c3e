"""The laboratory: its data are what they say, every mixer takes part, and results depend on the seed alone."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from deltanet_hf.errors import QualityError, UserError
from deltanet_hf.mixers import MIXER_NAMES
from measuring.lab import experiment
from measuring.lab.command import main
from measuring.lab.plot import main as draw
from measuring.lab.plot import read_rows
from measuring.lab.recall import DISTRACTORS, KEYS, VALUES, AssociativeRecall
from measuring.lab.table import by_model, mean_accuracy, pairs_recalled, table
from measuring.lab.tasks import IGNORED
from measuring.lab.tiny_models import NO_POSITIONS, MixerChoice, tiny_model
from measuring.lab.tracking import Level, WordProblem
from measuring.lab.training import TrainSettings, accuracies, train
from support.refusals import assert_refused


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_running_products_are_compositions() -> None:
    degree = 5
    task = WordProblem("x", degree, trained=12)
    inputs, labels = task.batch(40, Level(12, degree), generator())
    assert inputs.shape == labels.shape == (3, 13)
    assert (inputs[:, 0] == task.start).all()
    assert (labels[:, 0] == IGNORED).all()
    for words, answers in zip(inputs[:, 1:].tolist(), labels[:, 1:].tolist(), strict=True):
        slots = tuple(range(degree))
        for word, answer in zip(words, answers, strict=True):
            slots = tuple(task.elements[word][slot] for slot in slots)
            assert task.elements[answer] == slots


def test_elements_join_by_their_number_of_transpositions() -> None:
    task = WordProblem("s5", 5)
    counts = torch.bincount(task.transpositions)
    assert counts.tolist() == [1, 10, 35, 50, 24]
    assert task.curriculum[0] == Level(4, 1)
    assert task.curriculum[-1] == Level(32, 4)
    for before, after in pairwise(task.curriculum):
        assert (before.length, before.most, before.share or 2) < (after.length, after.most, after.share or 2)
    inputs, _ = task.batch(33 * 300, Level(32, 3, 0.2), generator())
    found = torch.bincount(task.transpositions[inputs[:, 1:].flatten()], minlength=5) / inputs[:, 1:].numel()
    assert found[3] == pytest.approx(0.2, abs=0.02)
    assert found[4] == 0
    inputs, _ = task.batch(33 * 300, task.curriculum[-1], generator())
    found = torch.bincount(inputs[:, 1:].flatten(), minlength=120) / inputs[:, 1:].numel()
    assert found.min() > 0.5 / 120  # uniform over the group


def test_answers_that_count_are_at_the_end() -> None:
    task = WordProblem("s3", 3, trained=32)
    batches = dict(task.test_batches(600, generator()))
    assert tuple(batches) == task.points == (8, 16, 32, 64, 128, 256)
    for length, (inputs, labels) in batches.items():
        assert inputs.shape[1] == length + 1
        assert ((labels != IGNORED).sum(1) == max(1, length // 8)).all()
        assert (labels[:, -1] != IGNORED).all()


@pytest.mark.parametrize("pairs", [5, KEYS])
def test_every_key_is_asked_once_and_its_answer_is_in_the_sequence(pairs: int) -> None:
    inputs, labels = AssociativeRecall("mqar").batch(6, pairs, generator(pairs))
    assert inputs.shape == (6, 4 * pairs)
    assert ((labels != IGNORED).sum(1) == pairs).all()
    for row, answers in zip(inputs.tolist(), labels.tolist(), strict=True):
        is_key = [token < KEYS for token in row]
        given = {row[t]: row[t + 1] for t in range(len(row)) if is_key[t] and answers[t] == IGNORED}
        asked = {row[t]: answers[t] for t in range(len(row)) if answers[t] != IGNORED}
        assert given == asked
        assert len(given) == pairs
        assert all(KEYS <= value < KEYS + VALUES for value in given.values())
        assert sum(token >= KEYS + VALUES for token in row) == pairs
        last = max(t for t in range(len(row)) if is_key[t] and answers[t] == IGNORED)
        assert all(t > last for t in range(len(row)) if answers[t] != IGNORED)
    assert inputs.max() < KEYS + VALUES + DISTRACTORS == AssociativeRecall("mqar").vocabulary


def test_the_order_of_pairs_and_questions_differs_by_row() -> None:
    inputs, labels = AssociativeRecall("mqar").batch(4, 16, generator())
    places = {tuple((row != IGNORED).nonzero().flatten().tolist()) for row in labels}
    assert len(places) == 4
    order = AssociativeRecall("mqar")
    assert torch.equal(order.batch(4, 16, generator())[0], inputs)


@pytest.mark.parametrize("mixer", [*(name for name in MIXER_NAMES if f"{name}+window" not in MIXER_NAMES), "softmax"])
def test_every_mixer_takes_part(mixer: str) -> None:
    """One step changes the weights, gradients reach the layer, and tests give accuracies; states beside a window."""
    settings = ":window=8" if mixer.endswith("+window") or mixer == "window" else ""
    table_of = MixerChoice(mixer + settings).table(1, {**NO_POSITIONS, "conv_size": 0})
    task = WordProblem("s3", 3, trained=4)
    model = tiny_model(table_of, task.vocabulary, 16, 2, 8, seed=0)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, task, TrainSettings(2, 1e-2, 20), 0, lambda *_: None)
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(before[name], parameter)]
    assert any("self_attn.k_proj" in name for name in moved)
    found = accuracies(model, task, 0, tokens=20)
    assert set(found) == set(task.points)
    assert all(0 <= value <= 1 for value in found.values())


def test_the_seed_decides_everything() -> None:
    task = WordProblem("s3", 3, trained=4)
    states = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))  # the state of the global generator does not matter
        layers = MixerChoice("gated_deltanet").table(1, NO_POSITIONS)
        model = tiny_model(layers, task.vocabulary, 16, 2, 8, seed)
        train(model, task, TrainSettings(3, 1e-2, 20), seed, lambda *_: None)
        states.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.slow
def test_parity_is_learnt_with_negative_eigenvalues_only() -> None:
    """In this many steps, on short words; the model without them is at chance beyond what it has memorised."""
    task = WordProblem("parity", 2, trained=16)
    found = {}
    for label in ("gated_deltanet:allow_neg_eigval=true", "gated_deltanet"):
        layers = MixerChoice(label).table(1, {**NO_POSITIONS, "conv_size": 0})
        model = tiny_model(layers, task.vocabulary, 32, 2, 16, seed=0)
        level = train(model, task, TrainSettings(160, 1e-2, 512), 0, lambda *_: None)
        found[label] = (level + 1 == task.levels, accuracies(model, task, 0, tokens=4096)[16])
    solved, failed = found.values()
    assert solved[0]
    assert solved[1] > 0.97
    assert not failed[0]
    assert failed[1] < 0.75


def test_a_level_is_left_when_it_is_solved() -> None:
    class Certain(torch.nn.Module):
        """Gives the parity of the tokens, which no training changes."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, inputs: torch.Tensor, use_cache: bool) -> Any:
            product = (inputs % 2).cumsum(1) % 2
            logits = torch.nn.functional.one_hot(product, 3) * 20.0 + self.weight
            return type("Output", (), {"logits": logits})

    task = WordProblem("parity", 2)  # the start token is 2, so the cumulated sum is that of the words
    seen: list[tuple[int, int, float]] = []
    level = train(Certain(), task, TrainSettings(80, 0.0, 200), 0, lambda *now: seen.append(now))
    assert seen == [(20, 0, 1.0), (40, 1, 1.0), (60, 2, 1.0), (80, 6, 1.0)]  # the last quarter is of the last level
    assert (level, task.levels) == (3, 7)
    assert accuracies(Certain(), task, 0, tokens=500) == dict.fromkeys(task.points, 1.0)


def test_a_model_that_diverges_says_so() -> None:
    task = WordProblem("parity", 2, trained=4)
    model = tiny_model(MixerChoice("softmax").table(1, {}), task.vocabulary, 16, 2, 8, seed=0)
    torch.nn.init.constant_(model.get_output_embeddings().weight, torch.nan)
    with pytest.raises(QualityError, match="lower --rate"):
        train(model, task, TrainSettings(20, 1e-2, 20), 0, lambda *_: None)


def test_wrong_mixers_are_one_clear_error() -> None:
    rows = [
        ("gated_deltnet", "--mixer gated_deltnet: got 'gated_deltnet', did you mean gated_deltanet[?]"),
        ("mixed_heads", "--mixer mixed_heads: "),
        ("gated_deltanet:ropes=true", "gated_deltanet:ropes=true.*unknown key 'ropes'"),
        ("gated_deltanet:rope", "gated_deltanet:rope.*KEY=VALUE"),
        ("gated_deltanet:", "gated_deltanet:.*KEY=VALUE"),
        ("gated_deltanet:conv_size=9", "gated_deltanet:conv_size=9.*conv_size: got 9"),
        ("softmax:window=3", "softmax:window=3.*softmax has no settings"),
    ]
    assert_refused(
        lambda label: MixerChoice(label).table(1, NO_POSITIONS),
        [({"label": label}, UserError, said) for label, said in rows],
    )


def test_given_settings_go_before_those_of_the_laboratory() -> None:
    kind = MixerChoice("deltaproduct:num_householder=3,rope=true").table(2, {**NO_POSITIONS, "conv_size": 0}).only_kind
    assert (kind.settings.num_householder, kind.settings.rope) == (3, True)
    assert (kind.settings.k_offset, kind.settings.conv_size) == (False, 0)


def call(function: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_rows_a_plot_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "TEST_TOKENS", 300)
    out = tmp_path / "new" / "parity.json"
    options = ["--out", str(out), "--width", "16", "--head-dim", "8", "--steps", "1", "--batch-tokens", "20"]
    first = call(main, "parity", "--mixer", "softmax", "--mixer", "gated_deltanet", *options)
    assert first.exit_code == 0, first.output
    rows = json.loads(out.read_text())
    assert [(row["mixer"], row["seed"], row["head_dim"], row["layers"]) for row in rows] == [
        ("softmax", 0, 8, 1),
        ("gated_deltanet", 0, 8, 1),
    ]
    assert rows[0]["bytes"] > rows[1]["bytes"] == 4 * 8 * 8 * 4
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    again = call(main, "parity", "--mixer", "gated_deltanet", "--seed", "0", "--seed", "1", *options)
    assert again.exit_code == 0, again.output
    assert "/2) |" in again.output
    measured, rows = rows, json.loads(out.read_text())
    assert rows[:2] == measured  # not measured again
    assert sorted((row["mixer"], row["seed"]) for row in rows) == [
        ("gated_deltanet", 0),
        ("gated_deltanet", 1),
        ("softmax", 0),
    ]
    other = call(main, "parity", "--mixer", "softmax", *options, "--heads", "2", "--rate", "0.02", "--decay", "0")
    assert other.exit_code == 0, other.output
    found = {
        (row["heads"], row["rate"], row["decay"]) for row in json.loads(out.read_text()) if row["mixer"] == "softmax"
    }
    assert found == {(4, 0.01, 0.1), (2, 0.02, 0.0)}  # other settings replace nothing
    drawn = call(draw, str(out), "--out", str(tmp_path / "a.png"), "--mixer", "softmax")
    assert drawn.exit_code == 0, drawn.output
    assert "gated_deltanet" not in drawn.output
    assert (tmp_path / "a.png").is_file()


def test_mistakes_end_the_command_before_training(tmp_path: Path) -> None:
    for arguments, words in (
        ("paritee --mixer softmax", "TASK: got 'paritee', expected one of parity, s3, s5, mqar"),
        ("parity --mixer softmax --mixer nothing", "--mixer nothing"),
        ("parity --mixer softmax --head-dim 7", "--head-dim 7"),
    ):
        done = call(main, *arguments.split(), "--out", str(tmp_path / "x.json"))
        assert isinstance(done.exception, UserError)
        assert words in str(done.exception)
        assert not (tmp_path / "x.json").exists()


def test_plots_of_two_tasks_or_broken_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[1,")
    with pytest.raises(UserError, match=r"bad\.json: cannot be read"):
        read_rows([tmp_path / "bad.json"])
    with pytest.raises(UserError, match="of one task"):
        table([{"task": "s3", "mixer": "a", "head_dim": 2}, {"task": "s5", "mixer": "a", "head_dim": 2}])


def recall_row(mixer: str, head_dim: int, seed: int, *accuracy: float) -> dict[str, Any]:
    row = {
        "task": "mqar",
        "mixer": mixer,
        "head_dim": head_dim,
        "seed": seed,
        "bytes": 64 * head_dim,
        "chance": 1 / 128,
    }
    return {**row, "points": [4, 8], "accuracy": list(accuracy)} if accuracy else {**row, "error": "diverged"}


def test_recall_is_drawn_by_head_size_and_bytes(tmp_path: Path) -> None:
    rows = [
        recall_row("a", 32, 0, 1.0, 0.5),
        recall_row("a", 32, 1, 1.0, 0.75),
        recall_row("a", 64, 0, 1.0, 1.0),
        recall_row("b", 32, 0),
    ]
    assert mean_accuracy(rows[:2]) == {4: 1.0, 8: 0.625}
    assert pairs_recalled({4: 1.0, 8: 0.625}) == 5.0
    lines = table(rows).splitlines()
    assert lines[0] == "| mixer | head size | KB | 4 | 8 | pairs recalled | diverged |"
    assert lines[2] == "| a | 32 | 2.0 | 100.0 | 62.5 | 5 | 0 |"
    assert lines[4] == "| b | 32 | 2.0 | - | - | 0 | 1 |"
    (tmp_path / "rows.json").write_text(json.dumps([{**row, "trained": 128} for row in rows]))
    draw([tmp_path / "rows.json"], tmp_path / "recall.png")
    assert (tmp_path / "recall.png").stat().st_size > 5000


def test_rows_of_other_settings_are_lines_of_their_own() -> None:
    """They would be averaged as seeds of one model, and nobody would see which of them solved the task."""
    rows = [
        {**recall_row("a", 32, 0, 1.0, 0.5), "decay": 0.1, "heads": 2, "batch_tokens": 8192},
        {**recall_row("a", 32, 1, 1.0, 0.5), "decay": 0.1, "heads": 2, "batch_tokens": 32768},
        {**recall_row("a", 32, 2, 1.0, 0.5), "decay": 0.1, "heads": 2, "batch_tokens": 32768},
    ]
    assert {name: len(group) for (name, _), group in by_model(rows).items()} == {
        "a, 8,192 tokens/step": 1,
        "a, 32,768 tokens/step": 2,
    }
    assert list(by_model(rows[1:])) == [("a", 32)]
