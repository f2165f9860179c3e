"""Feeds damaged files to conversions and recipes; prints the findings as JSON.

    python -m support.fuzz CASES [SEED]

Every case damages one file of a good input and runs what reads it. It may succeed, or end with one clear line
(UserError, QualityError); nothing may be left but a complete output folder.
"""

from __future__ import annotations

import copy
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml
from transformers.utils import logging

from deltanet_convert import output_files
from deltanet_convert.conversion import convert
from deltanet_convert.job import prepare, sole_conversion
from deltanet_convert.options import ConvertOptions
from deltanet_convert.start import START
from deltanet_hf.errors import QualityError, UserError
from deltanet_recipes.config import load_recipe
from deltanet_recipes.training.model_pair import check_models
from support.tiny_conversion import PLAIN, quick_start, teacher_folder, text_file
from support.tiny_gguf import write_gguf
from support.tiny_run import ALIGN, DISTIL, make_workplace, recipe_tree
from support.tiny_selection import selection_file

LONGEST_LINE = 1500  # characters of a message, paths included
SECONDS = 30  # a case that takes longer hangs


ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**30,
    1.5,
    -2.5,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "x",
    "7",
    "a" * 5000,
    "\udcff",
    "a\0b",
    "a\nb",
    "../x",
    "/etc/passwd",
    [],
    [1],
    ["x", None],
    {},
    {"a": 1},
    [[[[[[]]]]]],
)


def damaged_json(value: Any, random: Random) -> Any:
    """A copy of a JSON value with one to three changes: a value replaced, removed, added, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_containers(value))
        place = random.choice(places) if places else None
        if place is None or (place is value and random.random() < 0.02):
            return random.choice(ODD)
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys or random.random() < 0.1:
            _add(place, random)
            continue
        key, how = random.choice(keys), random.random()
        if how < 0.6:
            place[key] = copy.deepcopy(random.choice(ODD))
        elif how < 0.8:
            del place[key]
        elif how < 0.9:
            place[key] = [place[key]]
        else:
            place[key] = copy.deepcopy(place[random.choice(keys)])
    return value


def damaged_bytes(data: bytes, random: Random, among: int | None = None) -> bytes:
    """The bytes cut off, overwritten, inserted or flipped; but for cuts, among the first `among`."""
    data, among = bytearray(data), min(len(data), among or len(data))
    for _ in range(random.choice((1, 1, 2, 8))):
        at, how = random.randrange(among + 1), random.random()
        if how < 0.25:
            return bytes(data[: random.choice((at, random.randrange(len(data) + 1)))])
        if how < 0.5:
            data[at : at + 1] = bytes([random.randrange(256)])
        elif how < 0.65:
            data[at : at + 8] = random.randrange(2**64).to_bytes(8, "little")
        elif how < 0.8:
            data[at : at + 8] = random.randrange(300).to_bytes(8, "little")
        elif how < 0.9:
            data[at:at] = random.randbytes(random.randrange(1, 20))
        else:
            del data[at : at + random.randrange(1, 20)]
    return bytes(data)


def damaged_text(value: Any, random: Random) -> bytes:
    """The JSON text of a value, with damage to the value or to its bytes."""
    if random.random() < 0.8:
        return json.dumps(damaged_json(value, random)).encode()
    return damaged_bytes(json.dumps(value, indent=1).encode(), random)


def _containers(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _add(place: Any, random: Random) -> None:
    if isinstance(place, dict):
        place[random.choice(("deltanet", "text_config", "quantization_config", "auto_map", "x", "", "\udcff"))] = 1
    else:
        place.append(copy.deepcopy(random.choice(ODD)))


@dataclass
class Findings:
    """The outcomes of the cases, per kind of file."""

    refused: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)


class Inputs:
    """The good inputs, in a folder of their own, and a folder per case with copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        START["gated_deltanet"] = quick_start
        output_files.layer_error_plot = lambda layers, path: path.write_bytes(json.dumps(layers).encode())
        self.teacher = teacher_folder(folder / "teacher", "qwen3", num_hidden_layers=2)
        self.shards = teacher_folder(folder / "shards", "llama", "20KB", num_hidden_layers=2)
        write_gguf(folder / "teacher.gguf")
        make_workplace(folder / "work")
        self.text = text_file(folder)

    def convert(self, teacher: Path, case: Path, **options: Any) -> None:
        options = {**PLAIN, "text": self.text, "calibration_tokens": 64, "device": "cpu", **options}
        out = case / "out"
        with sole_conversion(out):
            convert(prepare(str(teacher), out, ConvertOptions(**options)), out, lambda *args: None)


def config(inputs: Inputs, case: Path, random: Random) -> None:
    _json_file(inputs.teacher, "config.json", inputs, case, random)


def other_json(inputs: Inputs, case: Path, random: Random) -> None:
    names = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")
    _json_file(inputs.teacher, random.choice(names), inputs, case, random)


def index(inputs: Inputs, case: Path, random: Random) -> None:
    _json_file(inputs.shards, "model.safetensors.index.json", inputs, case, random)


def header(inputs: Inputs, case: Path, random: Random) -> None:
    teacher = Path(shutil.copytree(inputs.teacher, case / "teacher"))
    file = teacher / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if random.random() < 0.6:
        body = json.dumps(damaged_json(json.loads(raw[8 : 8 + length]), random)).encode()
        file.write_bytes(len(body).to_bytes(8, "little") + body + raw[8 + length :])
    else:
        file.write_bytes(damaged_bytes(raw, random, among=8 + length))
    inputs.convert(teacher, case)


def gguf(inputs: Inputs, case: Path, random: Random) -> None:
    file = case / "teacher.gguf"
    raw = (inputs.folder / file.name).read_bytes()
    file.write_bytes(damaged_bytes(raw, random, among=random.choice((64, 600, 6000))))
    inputs.convert(file, case)


def recipe(inputs: Inputs, case: Path, random: Random) -> None:
    tree = recipe_tree(inputs.folder / "work", [ALIGN, {**DISTIL, "name": "second"}], output=str(case / "out"))
    file, overrides = case / "recipe.yaml", []
    how = random.random()
    if how < 0.6:
        file.write_text(yaml.safe_dump(damaged_json(tree, random), allow_unicode=False))
    elif how < 0.8:
        file.write_bytes(damaged_bytes(yaml.safe_dump(tree).encode(), random))
    else:
        file.write_text(yaml.safe_dump(tree))
        key = random.choice(("student", "stages.0.tokens", "stages.second.lora_rank", "data.sources.0.path", "a.b", ""))
        overrides = [f"{key}={json.dumps(damaged_json({'a': 1}, random))}", f"{key}[=: {{"][: random.randrange(1, 3)]
    check_models(load_recipe(file, overrides))


def layers(inputs: Inputs, case: Path, random: Random) -> None:
    keys = {"model_type": "qwen3", "num_hidden_layers": 2, "settings": {"window": 8}, "kept": [[1, 0]]}
    file = Path(selection_file(case, **keys)).rename(case / "layers.json")
    selection = json.loads(file.read_text())
    value = random.choice((selection, {**selection, "unit": "layer", "kept": [1], "order": [1]}, [1]))
    file.write_bytes(damaged_text(value, random) if random.random() < 0.9 else damaged_bytes(b"1  # kept\n", random))
    inputs.convert(inputs.teacher, case, layers=str(file))


def _json_file(good: Path, name: str, inputs: Inputs, case: Path, random: Random) -> None:
    teacher = Path(shutil.copytree(good, case / "teacher"))
    (teacher / name).write_bytes(damaged_text(json.loads((good / name).read_text()), random))
    inputs.convert(teacher, case)


KINDS: tuple[Callable[[Inputs, Path, Random], None], ...] = (config, header, gguf, recipe, layers, index, other_json)


def run(cases: int, folder: Path, seed: int = 0) -> Findings:
    """Runs the cases in turn over the kinds of files, with all files in `folder`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    inputs, found = Inputs(folder / "good"), Findings()
    for number in range(cases):
        kind = KINDS[number % len(KINDS)]
        case = folder / f"case-{number}"
        case.mkdir()
        before = _files(folder)
        problem = _problem(kind, inputs, case, Random(f"{seed} {number}"), found)
        new = _files(folder).keys() - before.keys() - {"teacher", "teacher.gguf", "recipe.yaml", "layers.json"}
        new = {name for name in new if not name.startswith(tuple(f"{case.name}/{given}" for given in GIVEN))}
        complete = (case / "out" / "conversion.json").is_file()
        stray = sorted(name for name in new if not (complete and name.startswith(f"{case.name}/out")))
        changed = sorted(name for name, state in before.items() if _files(folder).get(name) != state)
        if problem or stray or changed:
            found.wrong.append(
                {"kind": kind.__name__, "case": number, **problem, "left": stray[:5], "changed": changed}
            )
        else:
            shutil.rmtree(case)
    return found


GIVEN = ("teacher/", "teacher.gguf", "recipe.yaml", "layers.json")  # what a case's own input is called


def _problem(kind: Callable[..., None], inputs: Inputs, case: Path, random: Random, found: Findings) -> dict[str, Any]:
    """Run a case and describe what is wrong with its end; empty if nothing is."""
    try:
        with _time_limit():
            kind(inputs, case, random)
    except (UserError, QualityError) as error:
        message = str(error)
        found.refused[kind.__name__] += 1
        lines = message.split("\n") if kind is recipe else [message]  # a recipe's problems have a line each
        clear = all(line.isprintable() and 10 < len(line) <= LONGEST_LINE for line in lines)
        return {} if clear else {"message": message[:300]}
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        own = [step for step in traceback.extract_tb(error.__traceback__) if "/deltanet_" in step.filename]
        where = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}" if own else ""
        return {"error": f"{type(error).__name__}: {error}"[:300], "at": f"{at.filename}:{at.lineno}", "ours": where}
    found.accepted[kind.__name__] += 1
    return {}


@contextmanager
def _time_limit() -> Iterator[None]:
    def hang(*args: Any) -> None:
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every file, by its path in the folder."""
    return {
        str(file.relative_to(folder)): (file.lstat().st_size, file.lstat().st_mtime_ns)
        for file in folder.rglob("*")
        if not file.is_dir()
    }


def main(cases: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run(cases, Path(folder), seed)
    print(json.dumps({"refused": found.refused, "accepted": found.accepted, "wrong": found.wrong}, indent=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
