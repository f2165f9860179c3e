"""The command line: help, one-line errors, exit codes, generation."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deltanet_hf.errors import QualityError, UserError, one_line
from deltanet_hf.generate import load_for_inference
from deltanet_hf.models.cache_bits import set_cache_bits
from deltanet_hf.sessions import load_session
from deltanet_hf.sessions.conversation import first_turn, further_turn
from deltanet_hf.version import __version__, install_command
from deltanet_recipes.cli import COMMANDS, Subcommand
from deltanet_recipes.log_bars import hide_bars_in_logs
from support.command_line import CommandLine
from support.tiny_conversion import tiny_tokenizer
from support.tiny_models import tiny_student


def test_help_lists_every_command(cli: CommandLine) -> None:
    assert cli("--help") == 0
    shown = cli.out
    panels = re.findall(r"─ (\w+) ─", shown)
    assert panels == ["Options", "Convert", "Train", "Measure", "Run"]
    listed = re.findall(r"^│ (\w+) ", shown, re.MULTILINE)
    assert listed == [name for name in COMMANDS if name != "distil"]  # the other spelling of distill


def test_the_version(cli: CommandLine) -> None:
    assert cli("--version") == 0
    assert cli.out == f"deltanet-hf {__version__}\n"


def test_each_command_has_help(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in COMMANDS:
        assert cli(name, "--help") == 0, name
        shown = cli.out
        assert "Usage" in shown, name
        assert "…" not in shown, name  # nothing is cut in a narrow terminal


def test_bars_of_other_libraries_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        hide_bars_in_logs()
        assert os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None) == (None if terminal else "1")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `deltanet-hf generate` raise `error`."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(Subcommand, "load", lambda self: fail)


def test_errors_are_one_line_with_a_status(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"lm_eval.api": ("lm_eval", "eval"), "peft": ("peft", "train")}
    rows: list[tuple[Exception, int, str]] = [
        (UserError("a.json: x"), 2, "error: a.json: x"),
        (QualityError("worse"), 1, "failed: worse"),
        *(
            (ModuleNotFoundError(name=module), 2, f"error: {name} is not installed; run {install_command(extra)}\n")
            for module, (name, extra) in missing.items()
        ),
    ]
    for error, status, said in rows:
        failing(monkeypatch, error)
        assert cli("generate") == status
        shown = cli.err
        assert shown.startswith(said)
        assert shown.count("\n") == 1
    failing(monkeypatch, KeyboardInterrupt())
    assert cli("generate") == 130


def test_unexpected_errors_keep_their_traceback(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ValueError("a defect"), ModuleNotFoundError(name="deltanet_hf.absent")):
        failing(monkeypatch, error)
        with pytest.raises(type(error)):
            cli("generate")


def test_an_exception_as_one_line() -> None:
    assert one_line(ValueError("a\n  b"), None) == "a b"
    assert one_line(ValueError("abc"), 2) == "ab"
    assert one_line(ValueError(), None) == "ValueError"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model with a word-level tokenizer."""
    path: Path = tmp_path_factory.mktemp("model")
    tiny_student("llama", "qwen3_5", (0, 2)).save_pretrained(path)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 97)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>").save_pretrained(path)
    return path


def test_generate_prints_text_and_stats(cli: CommandLine, folder: Path) -> None:
    assert cli("generate", folder, "--prompt", "w5 w6", "--stats") == 0
    assert cli.out.split()
    assert all(word.startswith(("w", "<")) for word in cli.out.split())
    assert "tokens/s" in cli.err
    assert "bytes" in cli.err


def test_generate_reads_standard_input(cli: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("generate", folder, "--prompt", "w5 w6", "--max-new-tokens", "5") == 0
    asked = cli.out
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6"))
    assert cli("generate", folder, "--max-new-tokens", "5") == 0
    assert cli.out == asked
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert cli("generate", folder) == 2
    assert "--prompt: missing" in cli.err


def test_sampled_generation_is_repeated_by_its_seed(cli: CommandLine, folder: Path) -> None:
    texts = []
    for more in ([], ["--temperature", "1"], ["--temperature", "1"]):
        assert cli("generate", folder, "--prompt", "w5 w6", "--max-new-tokens", "9", *more) == 0
        texts.append(cli.out)
    assert texts[1] == texts[2]
    assert texts[0] != texts[1]


def test_a_quantised_cache_says_the_same_and_is_smaller(cli: CommandLine, folder: Path, tmp_path: Path) -> None:
    """The option and the model's own setting, which the option overrides."""
    own = shutil.copytree(folder, tmp_path / "own")
    set_cache_bits(load_for_inference(str(folder))[0], 8).config.save_pretrained(own)
    prompt, texts, sizes = " ".join(f"w{3 + i % 90}" for i in range(140)), set(), []
    for model, more in ((folder, []), (folder, ["--cache-bits", "8"]), (own, []), (own, ["--cache-bits", "16"])):
        assert cli("generate", model, "--prompt", prompt, "--max-new-tokens", "2", "--stats", *more) == 0
        texts.add(cli.out)
        sizes.append(int(cli.err.split(" bytes")[0].split("cache ")[1].replace(",", "")))
    exact, packed, by_model, back = sizes
    assert len(texts) == 1
    assert packed == by_model < exact == back


def test_what_the_model_prefers_for_its_answers_does_not_break_the_command(
    cli: CommandLine, folder: Path, tmp_path: Path
) -> None:
    model, shown = shutil.copytree(folder, tmp_path / "model"), []
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # stop strings are looked for in its words
    tokenizer.save_pretrained(model)
    file = model / "generation_config.json"
    usual = json.loads(file.read_text())
    unusual: list[dict[str, Any]] = [{"num_beams": 3, "num_return_sequences": 3}, {"cache_implementation": "static"}]
    unusual += [{"penalty_alpha": 0.6}, {"dola_layers": "low"}, {"is_assistant": True}, {"force_words_ids": [[3]]}]
    for settings in ({}, *unusual, {"use_cache": False}, {"stop_strings": ["no such words"]}):
        file.write_text(json.dumps(usual | settings))
        options = ["--prompt", "a b", "--max-new-tokens", "4", "--cache-bits", "8", "--session"]
        assert cli("generate", model, *options, tmp_path / str(len(shown))) == 0
        shown.append(cli.out)
    assert len(shown[0]) > 1
    assert set(shown) == {shown[0]}


PROMPTS = ("w5 w6 w7", "w8 w9", "w10")


@pytest.mark.parametrize("bits", [None, 8])
def test_a_session_goes_on_as_if_it_had_never_stopped(
    cli: CommandLine, bits: int | None, folder: Path, tmp_path: Path
) -> None:
    session, said = tmp_path / "session", []
    for prompt in PROMPTS:
        more = ["--cache-bits", bits] if bits else []
        options = ["--prompt", prompt, "--session", session, "--max-new-tokens", "4", "--stats", *more]
        assert cli("generate", folder, *options) == 0
        said.append((cli.out.strip(), cli.err))
    model, tokenizer = load_for_inference(str(folder))
    set_cache_bits(model, bits or 16)
    ids, cache, answers = torch.zeros(1, 0, dtype=torch.long), None, []
    for prompt in PROMPTS:
        before = torch.cat([ids, tokenizer(prompt, return_tensors="pt")["input_ids"]], dim=1)
        options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 2}
        result = model.generate(before, past_key_values=cache, **options)
        ids, cache = result.sequences, result.past_key_values
        answers.append(tokenizer.decode(ids[0, before.shape[1] :], skip_special_tokens=True))
    assert [text for text, _ in said] == [answer.strip() for answer in answers]
    saved = load_session(session, model)
    assert saved.input_ids.equal(ids.to(saved.input_ids.device))
    assert "prompt 3 tokens" in said[0][1]
    assert "prompt 3 tokens" in said[1][1]  # the last token of the answer and two more
    assert cli("generate", folder, "--prompt", "w3", "--session", session, "--cache-bits", "4") == 2
    assert f"in {bits or 16} bits, the model has 4" in cli.err


@pytest.mark.parametrize("ended", [True, False])
def test_a_chat_goes_on_with_the_tokens_of_its_template(ended: bool, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w90 ' if m.role == 'user' else 'w91 ' }}{{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}w91 {% endif %}"
    )
    reply = "w11 w12 </s>" if ended else "w11 w12"
    first = first_turn(tokenizer, "w5 w6", chat=True)
    assert first[0].tolist() == [90, 5, 6, 2, 91]
    end = tokenizer(reply, return_tensors="pt")["input_ids"]
    more = further_turn(tokenizer, "w7", True, int(end[0, -1]))
    assert [*end[0].tolist(), *more[0].tolist()] == [11, 12, 2, 90, 7, 2, 91]
    assert further_turn(tokenizer, "w7 w8", False, 2)[0].tolist() == [7, 8]
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(UserError, match="leaves out replies; use --no-chat"):
        further_turn(tokenizer, "w7", True, 2)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not m.content or 'w99' in m.content %}{{ raise_exception('no words') }}"
        "{% endif %}{{ m.content }} {% endfor %}"
    )
    assert further_turn(tokenizer, "w7", True, 2)[0].tolist() == [7]
    for turn in (first_turn, partial(further_turn, last=2)):
        with pytest.raises(UserError, match=r"the chat template of this model fails \(no words\); use --no-chat"):
            turn(tokenizer, "w99", chat=True)


REFUSED: list[tuple[list[str], str]] = [
    (["{folder}", "--prompt", "x", "--session", "{empty}/no/s"], "is no folder; create it first"),
    (["{folder}", "--prompt", "x", "--session", "{folder}/config.json"], "cannot be read as a session"),
    (["{folder}", "--prompt", "x", "--session", "{empty}"], "is a folder, or too long a name"),
    (["{folder}", "--prompt", "x", "--session", "{empty}/" + "x" * 250], "too long a name"),
    (["{folder}", "--prompt", "x", "--temperature", "1e-45"], "--temperature: got 1e-45, expected 0, which"),
    (["{folder}", "--prompt", "x", "--cache-bits", "5"], "--cache-bits: got 5, expected 16, 8 or 4"),
    (["no/such/folder", "--prompt", "x"], "no such folder"),
    (["./nothere", "--prompt", "x"], "./nothere: no such folder"),
    (["/nope", "--prompt", "x"], "/nope: no such folder"),
    (["{folder}", "--prompt", "x", "--device", "banana"], "--device: 'banana' cannot be used here"),
    (["{folder}", "--prompt", "x\udcff"], "--prompt: is not UTF-8"),
    (["{folder}", "--prompt", " "], "--prompt: ' ' has no tokens"),
    (["{folder}", "--prompt", ""], "--prompt"),
    (["{folder}", "--prompt", "x", "--dtype", "int8"], "--dtype"),
    (["{empty}", "--prompt", "x"], "config.json: missing"),
    (["{folder}/config.json", "--prompt", "x"], "is a file, not a model's folder"),
]


def test_generate_refuses(cli: CommandLine, folder: Path, tmp_path: Path) -> None:
    places = {"folder": folder, "empty": tmp_path}
    for arguments, said in REFUSED:
        assert cli("generate", *(argument.format(**places) for argument in arguments)) == 2, arguments
        assert said in cli.err, arguments


def without(tensor: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file({name: value for name, value in weights.items() if name != tensor}, folder / "model.safetensors")

    return change


def cut(name: str, length: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


def without_table(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    del values["deltanet"]
    (folder / "config.json").write_text(json.dumps(values))


DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (cut("model.safetensors", 5000), "the model cannot be loaded (Error while deserializing header"),
    (cut("model.safetensors", 0), "the model cannot be loaded"),
    (without("model.layers.1.self_attn.q_proj.weight"), "lack 1 tensors of the model, such as 'model.layers.1.self"),
    (without_table, "config.json cannot be loaded (deltanet: missing key"),
    (cut("config.json", 10), "config.json cannot be loaded"),
    (cut("tokenizer.json", 10), "its tokenizer cannot be loaded"),
    (lambda folder: (folder / "tokenizer.json").write_text("[]"), "its tokenizer cannot be loaded"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer; copy tokenizer.json"),
]


def test_generate_refuses_a_damaged_folder(cli: CommandLine, folder: Path, tmp_path: Path) -> None:
    for number, (change, said) in enumerate(DAMAGED):
        damaged = Path(shutil.copytree(folder, tmp_path / str(number)))
        change(damaged)
        assert cli("generate", damaged, "--prompt", "x") == 2
        error = cli.err.strip().splitlines()[-1]
        assert error.startswith(f"error: {damaged}: ")
        assert said in error
