"""The options of `deltanet-hf convert`: their meaning and their errors."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deltanet_convert.command_options import parse_size
from deltanet_convert.job import prepare
from deltanet_convert.keep_option import softmax_layers
from deltanet_convert.options import ConvertOptions
from deltanet_convert.views.settings_view import meanings, own_keys, print_settings
from deltanet_hf.errors import UserError
from deltanet_hf.mixers import MIXERS
from deltanet_hf.mixers.layer.settings import MixerSettings
from deltanet_hf.mixers.mixed_heads import MixedHeads
from support.refusals import assert_refused


def test_layers_that_stay_softmax() -> None:
    for spec, kept in {
        "none": (),
        "every:4": (3, 7, 11),
        "every:12": (11,),
        "every:1": tuple(range(12)),
        "layers:11, 0": (0, 11),
    }.items():
        assert softmax_layers(spec, 12) == kept, spec


def test_layers_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "layers"
    for content in ("[5, 2]", "2, 5", "# chosen by KL\n5\n2  # the last\n", "5\t2\n\n"):
        file.write_text(content)
        assert softmax_layers(str(file), 6) == (2, 5), content


def test_refused_layers() -> None:
    """In one line that names the option."""
    rows = [
        ("every:0", "at least 1"),
        ("every:²", "at least 1"),
        (f"every:{'9' * 5000}", "at least 1"),
        ("every:7", "keeps none of the 6 layers"),
        ("layers:6", "layer 6 does not exist; the teacher has layers 0 to 5"),
        ("layers:-1", "layer -1 does not exist"),
        ("layers:2,2", "layer 2 is listed twice"),
        ("layers:", "lists no layer"),
        ("layers:1.5", "'1.5' is not a layer index"),
    ]
    assert_refused(
        lambda spec: softmax_layers(spec, 6),
        [({"spec": spec}, UserError, rf"^--keep.*{said}.*\Z") for spec, said in rows],
    )


def test_what_is_no_value_of_keep(tmp_path: Path) -> None:
    """It is refused before the teacher is looked for."""
    said = "; expected auto, 40MB@32k, 5%@16k, 25%, 7, every:N, layers:3,7,11, none or an existing file"
    for spec, meant in (
        ("evry:4", ", did you mean every:4?"),
        ("layer:3,7", ", did you mean layers:3,7?"),
        ("some", ""),
        ("some" * 50, ""),
        ("~nobody-of-this-name/x", ""),
    ):
        with pytest.raises(UserError) as caught:
            prepare("no/such/teacher", tmp_path / "out", ConvertOptions(keep=spec))
        assert str(caught.value) == f"--keep: got '{spec}'{meant}{said}"


def test_refused_layer_files(tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    rows = [
        (b"", "lists no layer"),
        (b"[]", "lists no layer"),
        (b'{"keep": [1]}', "is not a layer index"),
        (b"[1.0]", "'1.0' is not a layer index"),
        (b"one two", "'one' is not a layer index"),
        (b"\xff\xfe", "cannot be read"),
        (b"99", "layer 99 does not exist"),
        (b" " * 1_000_001, "too large for a list of layers"),
    ]

    def read(content: bytes) -> None:
        file.write_bytes(content)
        softmax_layers(str(file), 6)

    assert_refused(
        read, [({"content": content}, UserError, f"{re.escape(str(file))}.*{said}") for content, said in rows]
    )


def test_sizes() -> None:
    for text, size in {"5GB": 5 * 10**9, "1.5 kB": 1500, "2GiB": 2**31, "77": 77, "1mib": 2**20}.items():
        assert parse_size(text) == size, text


def test_refused_sizes() -> None:
    texts = ["", "5 XB", "-1GB", "1e9", "9" * 400, "0", "0.1"]
    assert_refused(parse_size, [({"value": text}, UserError, "--shard-size") for text in texts])


def test_refused_values_name_the_option() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"profile": "Native"}, "--profile"),
        ({"dtype": "int8"}, "--dtype"),
        ({"calibration_tokens": 0}, "--calibration-tokens"),
        ({"shard_size": 0}, "--shard-size"),
        ({"seed": -1}, "--seed"),
        ({"mixer": "alibi", "changes": ("window=3",)}, "--set window=3: layers of this --mixer have no settings"),
        (
            {"mixer": "gated_deltanet", "changes": (f"conv_size={'9' * 5000}",)},
            "--set conv_size: got a number of 5000 digits",
        ),
        ({"mixer": "ttt", "changes": ("mini_batch=10000000000",)}, "--set mini_batch: got a number of 11 digits"),
    ]
    assert_refused(ConvertOptions, [(changes, UserError, option) for changes, option in rows])


def test_defaults_are_those_of_the_command() -> None:
    rows: list[tuple[dict[str, Any], tuple[str, str, int]]] = [
        ({}, ("auto", "gated_deltanet+window", 4)),
        ({"mixer": "gated_deltanet"}, ("auto", "gated_deltanet", 4)),
        ({"layers": "every:2", "cache_bits": 16}, ("every:2", "gated_deltanet+window", 16)),
        ({"mixer": "fox"}, ("none", "fox", 16)),
        ({"pure": True}, ("none", "gated_deltanet", 16)),
        ({"profile": "qwen3_5"}, ("none", "gated_deltanet", 16)),
    ]
    for given, wanted in rows:
        options = ConvertOptions(**given)
        assert (options.keep, options.mixer, options.cache_bits) == wanted, given


def test_the_earlier_form_of_keep() -> None:
    for layers, keep, automatic in (
        ("auto", "auto", True),
        ("auto:5%@16k", "5%@16k", True),
        ("auto:7", "7", True),
        ("all", "none", False),
        ("every:4", "every:4", False),
        ("keep:3,7", "layers:3,7", False),
        ("7.json", "7.json", False),
    ):
        typed = ConvertOptions(layers=layers)
        assert (typed.keep, typed.automatic) == (keep, automatic)
        assert typed == ConvertOptions(keep=keep)
        with pytest.raises(UserError, match=r"^--layers: is the earlier form of --keep"):
            ConvertOptions(layers=layers, keep=keep)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mixer": "gdn"}, "--mixer: got 'gdn', did you mean gated_deltanet?; expected one of gated_deltanet, "),
        ({"mixer": "windows"}, "--mixer: got 'windows', did you mean window?; "),
        ({"mixer": "?"}, "--mixer: got '?'; expected one of "),
        (
            {"mixer": "gated_deltanet", "changes": ("ropes=true",)},
            "--set ropes=true: unknown key 'ropes' of --mixer gated_deltanet, did you mean rope?; --set help lists ",
        ),
    ],
)
def test_what_was_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        ConvertOptions(**options)
    assert str(caught.value).startswith(said)
    assert "gated_deltanet+window" not in str(caught.value)  # NAME+window stands for all


def test_every_setting_has_a_meaning() -> None:
    shown = io.StringIO()
    print_settings(Console(file=shown, width=200))
    for kind in MIXERS.values():
        for settings in kind.Settings.__mro__:
            if issubclass(settings, MixerSettings):
                keys = [key for key in own_keys(settings) if kind is not MixedHeads]
                assert [key for key in keys if key not in meanings(settings)] == []
                assert [key for key in keys if f"\n{key} " not in shown.getvalue()] == []
