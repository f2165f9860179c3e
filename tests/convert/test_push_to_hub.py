"""`push_to_hub`: the repository loads with `trust_remote_code=True` and has card, licence, figures and tokenizer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import deltanet_hf
from deltanet_convert.start import START
from deltanet_convert.views.card_header import Metric, card_header, licence_note, licence_of
from deltanet_hf.errors import UserError
from deltanet_hf.hub import download_model
from deltanet_hf.models.hub_repository import CHANGED
from deltanet_hf.models.same_weights import same_weights
from deltanet_hf.version import install_command
from support.local_hub import LocalHub, environment, local_hub
from support.tiny_conversion import quick_start, teacher_folder, tiny_conversion
from support.tiny_models import tiny_student

REPO = "someone/converted"
TEACHER_CARD = "---\nlicense: other\nlicense_name: house-rules\ntags: [x]\n---\n# A teacher\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with local_hub(monkeypatch, tmp_path / "cache") as running:
        yield running


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion of a teacher that is published under terms of its own."""
    place = tmp_path_factory.mktemp("converted")
    teacher = teacher_folder(place / "teacher", "llama", num_hidden_layers=2)
    (teacher / "README.md").write_text(TEACHER_CARD)
    (teacher / "LICENSE.txt").write_text("the house rules")
    (teacher / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(START, "gated_deltanet", quick_start)
        tiny_conversion(teacher, place / "out")
    return place / "out"


def test_the_card_has_licence_and_figures(converted: Path) -> None:
    report = json.loads((converted / "conversion.json").read_text())
    card = ModelCard.load(converted / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "house-rules")
    assert card.data.model_name == "teacher with Gated DeltaNet layers"
    found = {result.metric_name: result.metric_value for result in card.data.eval_results}
    for key, name in {
        "perplexity": "perplexity",
        "teacher_perplexity": "perplexity of the teacher",
        "kl": "KL divergence from the teacher, nats per token",
    }.items():
        assert found[name] == pytest.approx(report["held_out"][key], rel=1e-4)
    assert {result.task_type for result in card.data.eval_results} == {"text-generation"}
    assert (
        "from `teacher`, whose licence, `house-rules`, applies to this model, too. Its text: `LICENSE.txt`" in card.text
    )
    assert "trust_remote_code=True" in card.text


def test_push_and_load_again(hub: LocalHub, converted: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    model.push_to_hub(REPO, tags=["mine"])
    files = hub.files(REPO)
    assert files.keys() == {file.name for file in converted.iterdir()}
    for name in ("LICENSE.txt", "conversion.json", "tokenizer.json", "chat_template.jinja", "deltanet_shim.py"):
        assert files[name] == (converted / name).read_bytes()
    card = ModelCard(files["README.md"].decode())
    assert card.data.tags == ["gated-deltanet", "linear-attention", "mine"]
    assert card.data.eval_results == ModelCard.load(converted / "README.md").data.eval_results
    assert f'from_pretrained("{REPO}", trust_remote_code=True)' in card.text
    ids = torch.arange(4, 20).unsqueeze(0)
    loaded = AutoModelForCausalLM.from_pretrained(REPO, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(REPO)("mice")["input_ids"]
        == AutoTokenizer.from_pretrained(converted)("mice")["input_ids"]
    )
    assert sorted(file.name for file in download_model(REPO).iterdir()) == sorted(
        name for name in files if name.endswith((".json", ".txt", ".md", ".jinja", ".safetensors"))
    )

    loaded.push_to_hub("someone/again", revision="v2")  # loaded by hub id: its card comes from there
    again = hub.repositories["someone/again"]
    copied = again.commits[again.refs["v2"]]["README.md"]
    assert b"house-rules" in copied
    assert b"model-index" in copied
    loaded.save_pretrained(tmp_path / "saved")
    saved = {file.name for file in (tmp_path / "saved").iterdir()}
    assert saved == {"config.json", "generation_config.json", "model.safetensors", "deltanet_shim.py"}
    assert (tmp_path / "saved" / "config.json").read_text() == (converted / "config.json").read_text()


def test_figures_of_other_weights_are_left_out(hub: LocalHub, converted: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.push_to_hub(REPO, max_shard_size="20KB")
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert card.data.eval_results is None
    assert (card.data.license, card.data.tags) == ("other", ["gated-deltanet", "linear-attention"])
    assert CHANGED in card.text


def test_weights_are_compared_by_name_and_value(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(1)}
    for name in ("one", "two", "none", "damaged"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"x")
    changes: list[tuple[dict[str, torch.Tensor], bool]] = [
        ({}, True),
        ({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, True),
        ({"a": torch.ones(3, 2)}, False),
        ({"a": torch.tensor([[1, 1, 1], [1, 1, 1.5]])}, False),
        ({"c": torch.ones(1)}, False),
    ]
    for change, same in changes:
        for name, tensor in {**tensors, **change}.items():
            save_file({name: tensor}, tmp_path / "two" / f"{name}.safetensors")
        assert same_weights(tmp_path / "one", tmp_path / "two") is same
        assert same_weights(tmp_path / "two", tmp_path / "one") is same
    assert not same_weights(tmp_path / "none", tmp_path / "none")
    assert not same_weights(tmp_path / "one", tmp_path / "damaged")


def test_a_link_out_of_the_folder_is_not_uploaded(hub: LocalHub, converted: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = Path(shutil.copytree(converted, tmp_path / "out"))
    (folder / "figure.png").symlink_to(tmp_path / "secret")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(UserError, match=r"'figure.png' is a link that leaves the folder"):
        model.push_to_hub(REPO)
    assert not hub.files(REPO)


def test_the_card_of_another_model_is_not_taken(hub: LocalHub, converted: Path) -> None:
    model = tiny_student("llama")
    model.config._name_or_path = model.name_or_path = str(converted.parent / "teacher")
    model.push_to_hub(REPO)
    assert "LICENSE.txt" not in hub.files(REPO)


def test_a_model_without_a_folder_has_the_card_of_transformers(hub: LocalHub) -> None:
    tiny_student("llama").push_to_hub(REPO)
    assert hub.files(REPO).keys() == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "deltanet_shim.py",
    }


NOT_INSTALLED = """
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "deltanet_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""


def loaded_elsewhere(hub: LocalHub, cache: Path, *setup: str) -> subprocess.CompletedProcess[str]:
    """Loads the repository in a new process that never imported the package."""
    script = "\n".join(
        [
            "import sys, transformers",
            *setup,
            f"m = transformers.AutoModelForCausalLM.from_pretrained({REPO!r}, trust_remote_code=True)",
            "print(type(m).__module__, type(m).__name__)",
        ]
    )
    variables = {**os.environ, **environment(hub, cache), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=variables, check=False)


@pytest.mark.slow
def test_a_machine_with_the_package(hub: LocalHub, converted: Path, tmp_path: Path) -> None:
    hub.add(REPO, converted)
    run = loaded_elsewhere(hub, tmp_path / "other")
    assert run.stdout.split() == ["deltanet_hf.models.factory", "DeltaNetLlamaForCausalLM"], run.stderr


@pytest.mark.slow
def test_a_machine_without_the_package(hub: LocalHub, converted: Path, tmp_path: Path) -> None:
    hub.add(REPO, converted)
    run = loaded_elsewhere(hub, tmp_path / "other", NOT_INSTALLED)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert f"needs deltanet-hf {deltanet_hf.__version__} or later: run `{install_command()}`, then load" in last


def shim(converted: Path) -> None:
    exec((converted / "deltanet_shim.py").read_text(), {})


def test_the_shim_is_small_and_wants_its_version(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (converted / "deltanet_shim.py").read_text()
    assert len(text.splitlines()) < 20
    assert text.count("import ") == 2
    version = deltanet_hf.__version__
    shim(converted)
    for installed, works in {"0.0.9": False, f"{version}.dev1": False, f"{version}.post1": True, "1.2.0": True}.items():
        monkeypatch.setattr("deltanet_hf.models.shim.__version__", installed)
        if works:
            shim(converted)
        else:
            with pytest.raises(ImportError, match=f"written by deltanet-hf {version}, and {installed} is installed"):
                shim(converted)
    monkeypatch.setitem(sys.modules, "deltanet_hf.models.shim", None)  # as where the package is missing
    with pytest.raises(ImportError, match=re.escape(install_command())):
        shim(converted)


def test_an_import_error_in_the_package_is_not_hidden(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deltanet_hf.models.shim")
    monkeypatch.setitem(sys.modules, "packaging.version", None)
    with pytest.raises(ModuleNotFoundError, match="packaging"):
        shim(converted)


CARDS: list[tuple[str | None, dict[str, object]]] = [
    ("---\nlicense: mit\n---\n", {"license": "mit"}),
    ("---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
    ("---\nlicense: [mit, apache-2.0]\n---\n", {"license": ["mit", "apache-2.0"]}),
    ('---\nlicense: "a: b"\nlicense_link: http://x\n---', {"license": "a: b", "license_link": "http://x"}),
    ("---\nlicense: [mit\n---\n", {}),
    ("---\nlicense: {a: b}\n---\n", {}),
    ("---\n- a\n---\n", {}),
    ("---\nlicense: !!python/object/apply:os.system ['true']\n---\n", {}),
    ("---\nlicense: !!bool maybe\n---\n", {}),
    ("---\nlicense: mit\n", {}),
    ("# title\n", {}),
    ("", {}),
    (None, {}),
]


def test_the_licence_of_any_card(tmp_path: Path) -> None:
    for number, (card, found) in enumerate(CARDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        if card is not None:
            (folder / "README.md").write_bytes(card.encode())
        assert licence_of(folder) == found, card
        assert ("name no licence" in licence_note("x", folder)) == (found == {}), card


def test_metadata_of_odd_names_and_values() -> None:
    name = "x: [a] # 'b' \"c\" ü"
    metrics = [Metric("perplexity", "p", float("nan")), Metric("kl_divergence", "k", 0.123456789)]
    text = card_header(name, ["t"], licence={}, base_model=None, measured_on="- y: z", metrics=metrics)
    data = ModelCard(text).data
    assert data.model_name == name
    assert [(result.metric_value, result.dataset_name) for result in data.eval_results] == [(0.12346, "- y: z")]
    none = card_header(name, ["t"], licence={}, base_model="a/b", measured_on="x", metrics=metrics[:1])
    assert ModelCard(none).data.eval_results is None
    assert ModelCard(none).data.base_model == "a/b"
