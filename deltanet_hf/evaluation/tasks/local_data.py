"""lm-eval's stock tasks on local files.

A data folder holds files `NAME/SPLIT.jsonl` or `NAME/SPLIT.jsonl.gz`. `write_task_folder` writes one YAML file per
task, which includes the stock file of the installed lm-eval and overrides the source of the rows only. Prompts, metrics
and filters are the stock ones, so scores compare with published ones. Where this package is installed, such a folder
also works with `lm_eval --include_path FOLDER`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from lm_eval.tasks._yaml_loader import load_yaml

from deltanet_hf.errors import UserError
from deltanet_hf.version import install_command

Row = dict[str, Any]
OWN_TASKS = Path(__file__).parent / "yaml"


@dataclass(frozen=True)
class LocalTask:
    """The local files of a task.

    Attributes:
        stock: the task's YAML file, relative to lm-eval's task folder, or to `OWN_TASKS` if `own`.
        files: split -> candidate files without suffix; the first that exists is read.
        adapt: converts a row to the format of the stock data set.
        own: whether the YAML file belongs to this package.
    """

    stock: str
    files: dict[str, tuple[str, ...]]
    adapt: Callable[[Row], Row] = field(default=lambda row: row)
    own: bool = False


def _lambada(row: Row) -> Row:
    return {"text": row.get("text") or f"{row['context']} {row['continuation'].strip()}"}


def _arc(row: Row) -> Row:
    if "query" not in row:
        return {key: row[key] for key in ("id", "question", "choices", "answerKey")}
    question = row["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    choices = {"text": row["choices"], "label": labels}
    return {"id": row["id"], "question": question, "choices": choices, "answerKey": labels[row["gold"]]}


def _openbookqa(row: Row) -> Row:
    if "question_stem" in row:
        return {key: row[key] for key in ("id", "question_stem", "choices", "answerKey")}
    adapted = _arc(row)
    return {"question_stem": adapted.pop("question"), **adapted}


def _boolq(row: Row) -> Row:
    # super_glue stores an integer label; with the boolean `answer`, the stock score would silently be 0.
    return {"label": int(row["label"] if "label" in row else row["answer"]), **_only(row, "question", "passage")}


def _squad_completion(row: Row) -> Row:
    # OLMo's rows of SQuAD: title, passage, question and "Answer:" in `query`, the answer in `choices`.
    return {"text": row["query"], "value": row["choices"][0]} if "query" in row else _only(row, "text", "value")


def _trivia_qa(row: Row) -> Row:
    return {"question": row["question"], "answer": {"aliases": row["answer"]["aliases"]}}


def _only(row: Row, *keys: str) -> Row:
    return {key: row[key] for key in keys}


def _gsm8k(row: Row) -> Row:
    return _only(row, "question", "answer")


def _split(name: str, *splits: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{name}/{split}",) for split in splits}


_LAMBADA: dict[str, tuple[str, ...]] = {"test": ("lambada_openai/test", "lambada_openai/llmfoundry")}
_ALL = ("train", "validation", "test")

TASKS: dict[str, LocalTask] = {
    "lambada_openai": LocalTask("lambada/lambada_openai.yaml", _LAMBADA, _lambada),
    "lambada_last_word": LocalTask("lambada_last_word.yaml", _LAMBADA, _lambada, own=True),
    "hellaswag": LocalTask("hellaswag/hellaswag.yaml", _split("hellaswag", "train", "validation")),
    "piqa": LocalTask("piqa/piqa.yaml", _split("piqa", "train", "validation")),
    "arc_easy": LocalTask("arc/arc_easy.yaml", _split("arc_easy", *_ALL), _arc),
    "arc_challenge": LocalTask("arc/arc_challenge.yaml", _split("arc_challenge", *_ALL), _arc),
    "winogrande": LocalTask("winogrande/default.yaml", _split("winogrande", "train", "validation")),
    "sciq": LocalTask("sciq/sciq.yaml", _split("sciq", *_ALL)),
    "boolq": LocalTask("super_glue/boolq/default.yaml", _split("boolq", "train", "validation"), _boolq),
    "openbookqa": LocalTask("openbookqa/openbookqa.yaml", _split("openbookqa", *_ALL), _openbookqa),
    "gsm8k": LocalTask("gsm8k/gsm8k.yaml", _split("gsm8k", "train", "test"), _gsm8k),
    "triviaqa": LocalTask("triviaqa/default.yaml", _split("trivia_qa", "train", "validation"), _trivia_qa),
    "nq_open": LocalTask("nq_open/nq_open.yaml", _split("nq_open", "train", "validation")),
    "squad_completion": LocalTask(
        "squad_completion.yaml", _split("squad_completion", "validation"), _squad_completion, own=True
    ),
    "ifeval": LocalTask("ifeval/ifeval.yaml", _split("ifeval", "train")),
    "humaneval": LocalTask("humaneval/humaneval.yaml", _split("humaneval", "test")),
    "mbpp": LocalTask("mbpp/mbpp.yaml", _split("mbpp", "test")),
}


def stock_folder() -> Path:
    """The task folder of the installed lm-eval."""
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"lm-eval is not installed; run {install_command('eval')}")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def find_file(folder: Path, name: str) -> Path | None:
    """The file `folder/name` with the suffix .jsonl or .jsonl.gz; None if neither exists."""
    return next((p for s in (".jsonl", ".jsonl.gz") if (p := folder / (name + s)).is_file()), None)


def _files(task: str, folder: Path) -> dict[str, Path]:
    """Split -> file, for the splits of the task that the folder has files for."""
    spec = _spec(task)
    found = {split: [p for c in names if (p := find_file(folder, c))] for split, names in spec.files.items()}
    return {split: paths[0] for split, paths in found.items() if paths}


def _spec(task: str) -> LocalTask:
    if task in TASKS:
        return TASKS[task]
    paradigm = task.removeprefix("blimp_")
    return LocalTask(f"blimp/{paradigm}.yaml", {"train": ("blimp/train", "blimp/all67")})


@lru_cache(maxsize=4)
def _blimp_by_paradigm(path: Path) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in read_rows(path):
        groups.setdefault(row["UID"], []).append(_only(row, "sentence_good", "sentence_bad", "UID"))
    return groups


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a .jsonl or .jsonl.gz file. Raises UserError for a line that is not JSON."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{path}: line {number} is not JSON ({error.msg}); write one object per line"
                ) from error
            yield row


def missing_files(tasks: Iterable[str], folder: Path) -> list[str]:
    """For each task without rows in `folder`: a file that would hold them, with the suffix .jsonl."""
    names = [name for name in tasks if not _files(name, folder)]
    return [f"{next(iter(reversed(_spec(name).files.values())))[0]}.jsonl" for name in names]


def load_local(local_task: str, local_folder: str, **_: object) -> dict[str, Dataset]:
    """The `custom_dataset` function for lm-eval: split -> rows of the task in the format of the stock data set."""
    files = _files(local_task, Path(local_folder))
    if local_task.startswith("blimp_"):
        paradigm = local_task.removeprefix("blimp_")
        return {split: Dataset.from_list(_blimp_by_paradigm(path)[paradigm]) for split, path in files.items()}
    adapt = _spec(local_task).adapt
    return {split: Dataset.from_list([adapt(row) for row in read_rows(path)]) for split, path in files.items()}


def write_task_folder(folder: Path, data: Path | None, more: Path | None = None) -> list[str]:
    """Write the YAML files of tasks into `folder`, for lm-eval's `--include_path`.

    Args:
        data: folder of local rows; None if all rows come from the Hub.
        more: another folder of task YAML files to include.

    Returns the names of the tasks in `folder`: those with local rows, this package's own (the demo's, last
    word, SQuAD), and those of `more`. Raises UserError for a folder that is missing or holds no known task.
    """
    names = [] if data is None else _write_local_tasks(folder, data)
    for root in [OWN_TASKS, *([more] if more else [])]:
        if not root.is_dir():
            raise UserError(f"{root}: no such folder of lm-eval tasks")
        for index, path in enumerate(sorted(root.glob("**/*.yaml"))):
            name = load_yaml(path, resolve_func=False).get("task")
            if name not in names:
                (folder / f"{root.name}_{index}.yaml").write_text(yaml.safe_dump({"include": str(path.resolve())}))
                names += [name] if isinstance(name, str) else []
    return names


def blimp_paradigms() -> list[str]:
    """Names of lm-eval's BLiMP tasks."""
    return [f"blimp_{path.stem}" for path in sorted((stock_folder() / "blimp").glob("[!_]*.yaml"))]


def _write_local_tasks(folder: Path, data: Path) -> list[str]:
    if not data.is_dir():
        raise UserError(
            f"{data}: no such data folder; give a folder of NAME/SPLIT.jsonl.gz files, e.g. piqa/validation.jsonl.gz"
        )
    names = [task for task in TASKS if _files(task, data)]
    blimp = _files("blimp_", data).get("train")
    if blimp is not None:
        present = _blimp_by_paradigm(blimp)
        names += [task for task in blimp_paradigms() if task.removeprefix("blimp_") in present]
    if not names:
        raise UserError(
            f"{data}: no file of a known task; its files are named NAME/SPLIT.jsonl.gz, e.g. piqa/validation.jsonl.gz"
        )
    for task in names:
        (folder / f"local_{task}.yaml").write_text(yaml_with_function(local_config(task, data)))
    return names


def local_config(task: str, data: Path) -> dict[str, Any]:
    """The YAML keys that make a task read local rows: the stock file to include, and its overrides."""
    spec = _spec(task)
    stock = (OWN_TASKS if spec.own else stock_folder()) / spec.stock
    splits = _files(task, data)
    config: dict[str, Any] = {"include": str(stock), "task": task}
    # A split without a file is removed; lm-eval then scores the next one that exists.
    names = yaml_splits(stock)
    config |= {key: None for key, split in names.items() if split not in splits}
    config["dataset_kwargs"] = {"local_task": task, "local_folder": str(data.resolve())}
    return config


def yaml_splits(path: Path) -> dict[str, str]:
    """The split keys of a YAML file and its includes, for instance {"test_split": "test"}."""
    config = load_yaml(path, resolve_func=False)
    keys = ("training_split", "validation_split", "test_split", "fewshot_split")
    return {key: config[key] for key in keys if config.get(key)}


def yaml_with_function(config: dict[str, Any]) -> str:
    """YAML text of a task with its `custom_dataset`, whose tag `!function` a safe dump cannot write."""
    return yaml.safe_dump(config, sort_keys=False) + f"custom_dataset: !function {__name__}.load_local\n"
