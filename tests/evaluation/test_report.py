"""The report command on tiny models, offline."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerFast

from deltanet_hf.data import prefix_ids
from deltanet_hf.errors import UserError
from deltanet_hf.evaluation.measures.scores import Score
from deltanet_hf.evaluation.measures.speed import sequence_bytes
from deltanet_hf.evaluation.report import model_rows
from deltanet_hf.evaluation.report.material import ReportOptions, read_material
from deltanet_hf.evaluation.report.model_rows import DEFAULT_BASELINES, line_up, named, training_tokens
from deltanet_hf.evaluation.report.write_report import run_report
from deltanet_hf.evaluation.tasks.harness import _stratified
from deltanet_hf.evaluation.tasks.lm_eval_model import DeltaNetLM
from deltanet_hf.evaluation.tasks.local_data import write_task_folder
from deltanet_hf.evaluation.tasks.suites import SUITES, draw_rows
from deltanet_hf.evaluation.training_free import with_windows
from deltanet_hf.models.cache_bits import cache_bits_of, set_cache_bits
from deltanet_hf.models.layers import LayerTable
from support.local_hub import local_hub
from support.tiny_models import tiny_mixture, tiny_student, tiny_teacher
from tests.evaluation.conftest import report_options, without_times


@pytest.fixture(scope="module", autouse=True)
def tiny_sizes() -> Iterator[None]:
    """Suites with the usual tasks and short texts and contexts."""
    with pytest.MonkeyPatch.context() as patch:
        short = {"pairs": (8,), "text_windows": (128,), "repeated": 64}
        tiny = replace(SUITES["small"], needle_lengths=(512, 1024), speed_lengths=(16,), **short)
        patch.setitem(SUITES, "tiny", tiny)
        patch.setitem(SUITES, "tiny texts", replace(SUITES["texts"], needle_lengths=(), **short))
        yield


@pytest.fixture(scope="module")
def options(
    teacher_folder: Path, student_folder: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> ReportOptions:
    wiki = data_folder / "wikitext2" / "wiki.test.tokens"
    wiki.parent.mkdir(exist_ok=True)
    wiki.write_text("".join(f" The cat , it sat @-@ down {i} times . \n" for i in range(20)))
    return report_options(teacher_folder, student_folder, data_folder, tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def document(options: ReportOptions) -> dict[str, Any]:
    return run_report(options, say=lambda _: None)


def test_rows_files_and_errors(document: dict[str, Any], options: ReportOptions) -> None:
    names = [model["name"] for model in document["models"]]
    assert names == [
        "teacher",
        "window 64 + 4 sinks",
        "hybrid",
        "untrained windows, bytes of hybrid",
        "kept layers of hybrid, untrained windows",
        "hybrid, linear layers off",
    ]
    assert {"report.md", "report.json", "recall.png", "speed.png", "pareto.png"} <= {
        path.name for path in options.out.iterdir()
    }
    assert json.loads((options.out / "report.json").read_text()) == json.loads(json.dumps(document))
    for model in document["models"]:
        assert set(model["texts"]) == {"hay", "wikitext2", "wikitext2_clean"}
        assert {"repeat_perplexity", "mqar_8", "needle_512"} == set(model["recall"])
        for scores in [*model["tasks"].values(), *model["texts"].values(), model["recall"]]:
            for score in scores.values():
                assert set(score) == {"value", "stderr", "items"}
                assert score["stderr"] is not None
                assert score["items"] >= 2
    text = (options.out / "report.md").read_text()
    assert "| **hybrid** |" in text
    assert "a trial, not a result" in text
    agreement = document["models"][2]["texts"]["hay"]["agreement"]["value"]
    assert f"| {100 * agreement:.2f} ± " in text.partition("## Same most likely token")[2]
    divergence = document["models"][2]["texts"]["hay"]["kl"]["value"]
    assert f"| {divergence:.4f} ± " in text.partition("## KL(teacher || model)")[2]


def test_a_text_is_cut_at_several_lengths(
    options: ReportOptions, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many short documents; windows of each length take the same tokens."""
    (tmp_path / "many.jsonl").write_text('{"text": "He sat by the quay."}\n' * 40)
    monkeypatch.setitem(SUITES, "tiny long", replace(SUITES["long"], text_windows=(64, 128, 256, 1024), repeated=64))
    several = replace(options, suite="tiny long", texts={"many": tmp_path / "many.jsonl"}, data=None, limit=5)
    texts = read_material(several, tokenizer, 512).texts
    prefix = len(prefix_ids(tokenizer))
    assert {name: tuple(windows.shape) for name, windows in texts.items()} == {
        "many@64": (5, prefix + 64),
        "many@128": (2, prefix + 128),
        "many@256": (1, prefix + 256),
    }
    assert torch.equal(texts["many@256"][0, prefix:], texts["many@64"][:4, prefix:].flatten())


def test_divergence_is_zero_only_for_the_teacher(document: dict[str, Any]) -> None:
    teacher, window, hybrid, of_equal_bytes, *others = document["models"]
    assert of_equal_bytes["texts"]["hay"]["kl"]["value"] >= 0  # its window is longer than the text's
    assert "kl" not in teacher["texts"]["hay"]
    assert all(model["texts"]["hay"]["kl"]["value"] > 1e-3 for model in [window, hybrid, *others])


def test_task_scores_are_lm_evals_own(document: dict[str, Any], options: ReportOptions, tmp_path: Path) -> None:
    write_task_folder(tmp_path, options.data)
    names = ["lambada_openai", "piqa", "sciq", "hellaswag"]
    lm = DeltaNetLM(options.students[0].partition("=")[2], device="cpu", batch_size="auto")
    results = simple_evaluate(
        model=lm,
        tasks=names,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        samples={name: draw_rows(name, 6, 3) for name in names},
        bootstrap_iters=10,
    )["results"]
    ours = document["models"][2]["tasks"]
    for name in names:
        for metric in ours[name]:
            assert ours[name][metric]["value"] == pytest.approx(results[name][f"{metric},none"]), (name, metric)
            if metric != "perplexity":  # lm-eval estimates its error by a bootstrap
                assert ours[name][metric]["stderr"] == pytest.approx(results[name][f"{metric}_stderr,none"])


def test_rerun_gives_the_same_numbers(document: dict[str, Any], options: ReportOptions, tmp_path: Path) -> None:
    """Also with fewer rows beside them."""
    again = without_times(run_report(replace(options, baselines=(), out=tmp_path), say=lambda _: None))
    assert [model["name"] for model in again] == ["teacher", "hybrid"]
    first = {model["name"]: model for model in without_times(document)}
    assert again == [first[model["name"]] for model in again]


@pytest.mark.slow
def test_several_processes_give_the_same_numbers(options: ReportOptions, tmp_path: Path) -> None:
    one = replace(options, suite="texts", limit=1, texts={}, data=None, baselines=("window",), out=tmp_path / "one")
    two = replace(one, processes=2, out=tmp_path / "two")
    alone = run_report(one, say=lambda _: None)
    together = run_report(two, say=lambda _: None)
    assert [model["name"] for model in together["models"]] == ["teacher", "window 64 + 4 sinks", "hybrid"]
    assert without_times(together) == without_times(alone)
    assert (tmp_path / "two" / "report.md").read_text() == (tmp_path / "one" / "report.md").read_text()


def assert_refused(options: ReportOptions, folder: Path, said: str, **changes: Any) -> None:
    """In one line, which leaves nothing behind."""
    with pytest.raises(UserError, match=said) as caught:
        run_report(replace(options, out=folder / "out", **changes), say=lambda _: None)
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


def test_what_cannot_be_measured_is_refused_first(options: ReportOptions, tmp_path: Path) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"suite": "huge"}, "--suite huge"),
        ({"baselines": ("magic",)}, "--baselines magic"),
        ({"students": [str(tmp_path)]}, "config.json: missing"),
        ({"texts": {"x": tmp_path / "none.txt"}}, "none.txt: no such file"),
        ({"data": tmp_path}, "no file of a known task"),
        ({"suite": "long", "texts": {}, "data": None}, r"--suite long measures KL on texts; name .* --text NAME=FILE"),
        ({"dtype": "int8"}, "--dtype: got 'int8', expected one of auto, float32"),
        ({"students": ["x=no/such/folder"]}, "no/such/folder: no such folder"),
        ({"students": ["=model"]}, "=model: no such folder"),
    ]
    for changes, said in rows:
        assert_refused(options, tmp_path, said, **changes)


@pytest.mark.slow
def test_a_text_that_a_process_misses_is_refused_in_one_line(options: ReportOptions, tmp_path: Path) -> None:
    texts = {"x": tmp_path / "none.txt"}
    assert_refused(options, tmp_path, "none.txt: no such file", suite="texts", texts=texts, processes=2)


def test_rows_of_a_pure_student_and_tokens(student_folder: Path, teacher_folder: Path, tmp_path: Path) -> None:
    config = json.loads((student_folder / "config.json").read_text())
    config["deltanet"]["layers"] = ["linear"] * 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "recipe.json").write_text(json.dumps({"stages": [{"tokens": 300}, {"tokens": 700}]}))
    rows = line_up(str(teacher_folder), [f"a={tmp_path}", f"b={tmp_path}"], ("linear-off",))
    assert [row.name for row in rows] == ["teacher", "a", "b"]
    assert [row.tokens for row in rows] == [0, 1000, 1000]
    assert training_tokens(teacher_folder) == 0
    with pytest.raises(UserError, match="two rows would be called 'a'"):
        line_up(str(teacher_folder), [f"a={tmp_path}", f"a={tmp_path}"], ())


def _config_folder(folder: Path, table: LayerTable) -> str:
    folder.mkdir()
    config = {"num_hidden_layers": len(table), "deltanet": table.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    return f"{folder.name}={folder}"


def test_untrained_baselines_follow_from_each_students_layers(tmp_path: Path) -> None:
    """Other layers are another configuration; a model of windows has no linear layers to switch off."""
    tables = {
        "a": LayerTable.preset(4, softmax=(1, 3)),
        "b": LayerTable.preset(4, softmax=(3,)),
        "c": LayerTable.preset(4, mixer="window", softmax=(3,)),
    }
    students = [_config_folder(tmp_path / name, table) for name, table in tables.items()]
    names = [row.name for row in line_up("teacher", students, ("linear-off",))]
    assert names == ["teacher", "a", "a, linear layers off", "b", "b, linear layers off", "c"]


@torch.no_grad()
def test_what_costs_no_training_has_the_bits_of_each_student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And, under windows, no fewer bytes than the student, which it would have with a token less."""
    monkeypatch.setattr(model_rows, "BYTES_AT", 130)
    tables = {
        "a": replace(LayerTable.preset(4, mixer="window", softmax=(3,), window=9), cache_bits=4),
        "b": replace(LayerTable.preset(4, softmax=(3,)), cache_bits=4),
        "c": LayerTable.preset(4, mixer="fox", softmax=(3,)),
    }
    students = [_config_folder(tmp_path / name, table) for name, table in tables.items()]
    rows = line_up("teacher", students, ("equal-bytes",))
    b = ["untrained windows, bytes of b", "kept layers of b, untrained windows"]
    assert [row.name for row in rows] == ["teacher", "a", "teacher, cache in 4 bits", "a, untrained", "b", *b, "c"]
    teacher, made = tiny_teacher("llama", max_position_embeddings=256), {}
    student = tiny_mixture("llama", tables["b"])
    for row in rows:
        if row.change is not None:
            made[row.name] = row.change(tiny_mixture("llama", tables[Path(row.folder).name]), teacher)
            assert cache_bits_of(made[row.name]) == 4
    policies: dict[str, tuple[Any, Any]] = {"teacher, cache in 4 bits": ((), None), "a, untrained": ((3,), 9)}
    for name, kept in zip(b, ((), (3,)), strict=True):
        window = made[name].model.layers[0].self_attn.settings.window
        policies[name] = kept, window
        shorter = with_windows(teacher, kept, window - 1)
        sizes = [sequence_bytes(each, 130) for each in (set_cache_bits(shorter, 4), student, made[name])]
        assert sizes[0] < sizes[1] <= sizes[2]
    ids = torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(0))
    for name, policy in policies.items():
        expected = set_cache_bits(with_windows(teacher, *policy), 4)
        torch.testing.assert_close(made[name](ids).logits, expected(ids).logits)


def test_ablations_follow_from_each_students_layers(tmp_path: Path) -> None:
    tables = {
        "a": LayerTable.preset(4, "gated_deltanet+window", softmax=(1,)),
        "b": LayerTable.preset(4, "gated_deltanet+window"),
        "c": LayerTable.preset(4, softmax=(1,)),
        "d": LayerTable.preset(4, mixer="window", softmax=(3,)),
    }
    students = [_config_folder(tmp_path / name, table) for name, table in tables.items()]
    rows = line_up("teacher", students, ("ablations",))
    assert pickle.loads(pickle.dumps(rows)) != []  # for processes of their own
    names = [row.name for row in rows]
    a, b = ["a, softmax off", "a, window off", "a, state off"], ["b, window off", "b, state off"]
    assert names == ["teacher", "a", *a, "b", *b, "c", "c, softmax off", "d"]


def test_a_damaged_recipe_of_a_student_is_named(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"stages": [1]}'):
        (tmp_path / "recipe.json").write_text(text)
        with pytest.raises(UserError, match=r"recipe.json: is no recipe of a run"):
            training_tokens(tmp_path)


def test_another_vocabulary_is_refused(
    options: ReportOptions, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_student("llama").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its vocabulary differs"):
        run_report(replace(options, students=[str(tmp_path)], baselines=(), suite="tiny texts"), say=lambda _: None)


def test_another_tokenizer_of_the_same_size_is_refused_first(options: ReportOptions, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(named(options.students[0])[1], other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["model"]["vocab"] |= {"A": vocabulary["model"]["vocab"]["B"], "B": vocabulary["model"]["vocab"]["A"]}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match="other: its tokenizer differs from the teacher's; a report uses one"):
        run_report(replace(options, students=[str(other)], out=tmp_path / "out"), say=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_student_of_the_hub_has_the_rows_of_its_folder(
    options: ReportOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(named(options.students[0])[1])
    (tmp_path / "recipe.json").write_text(json.dumps({"stages": [{"tokens": 300}]}))
    with local_hub(monkeypatch, tmp_path / "cache") as hub:
        hub.add("someone/hybrid", folder).commit(
            {**hub.files("someone/hybrid"), "recipe.json": (tmp_path / "recipe.json").read_bytes()}
        )
        rows = line_up("teacher", ["someone/hybrid"], DEFAULT_BASELINES)
    names = [row.name for row in line_up("teacher", [f"hybrid={folder}"], DEFAULT_BASELINES)]
    assert [row.name for row in rows] == names
    assert "hybrid, linear layers off" in names
    assert {row.tokens for row in rows if row.kind == "student"} == {300}


def test_one_row_of_each_paradigm_has_an_error() -> None:
    """A trial with `--limit` has no two rows that would show the spread within a paradigm."""
    parts: list[Any] = [SimpleNamespace(instances=[SimpleNamespace(doc_id=5)] * 2) for _ in range(4)]
    assert _stratified(parts, [1.0, 0.0, 1.0, 1.0]) == Score(0.75, 0.25, 4)
