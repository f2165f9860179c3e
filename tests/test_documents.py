"""README.md and docs/: length, links, command lines and the example of a mixer."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import deltanet_convert
import deltanet_recipes
from deltanet_hf.mixers import MIXERS, Mixer
from deltanet_hf.version import REPOSITORY
from deltanet_recipes.cli import COMMANDS, build_app
from deltanet_recipes.shipped import shipped_recipes
from measuring.kernels.__main__ import NAMES
from site_links import on_page_markdown
from support.tiny_models import tiny_student

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "recipes/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
UsageError = typer.BadParameter.__mro__[1]  # of Click, which newer versions of Typer contain
EXAMPLE = re.compile(r"<!-- example: relu_attention [^\n]*-->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DEVELOPER_PAGES = ("contributing.md", "kernel-code.md", "recipe-keys.md")
USER_PAGES = [page for page in PAGES if page.parent.name != "research" and page.name not in DEVELOPER_PAGES]
HOUSE_WORDS = re.compile(  # of the project alone: say full-attention head, before training, with, fused inference path
    r"\bwhole (?:key/value )?(?:heads?|layers?)\b|\b(?:heads?|layers?) (?:\w+ )?whole\b|\buntrained\b|\bbeside\b"
    r"|\b(?:fast|plain) form\b|\bstart values?\b|\bother jobs\b|\bbusy\b|\beven bits\b|\bearlier cache\b|\bwants\b"
    r"|\brows of \d|\bshare of (?:the )?(?:window|state)\b|‡",
    re.IGNORECASE,
)
NAME_WITH_NUMBER = re.compile(  # Llama 3.2 1B, vLLM 0.25 to 0.32
    r"\b(?:\w*[A-Z]\w*|torch|transformers|peft)[ -]\d[\w.]*(?:[ -]\d[\w.]*[BM]\b)?(?: (?:to|and) \d[.\d]*)?"
)
WORDS = {  # of a page at most, without tables
    "cli.md": 500,
    "converting.md": 1500,
    "gated-deltanet.md": 1200,
    "kernels.md": 1500,
    "mixers.md": 2500,
    "results.md": 1500,
    "running.md": 900,
    "selecting.md": 900,
    "serving.md": 1200,
    "speed.md": 500,
    "training.md": 1500,
    "troubleshooting.md": 1000,
}
OPERATOR = re.compile(r"^\| \[`(\w+)`\]", re.MULTILINE)
RULE = re.compile(r"<!-- example: gated_delta_rule [^\n]*-->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code, formulas, comments and addresses of links."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`]*`|\$[^$]*\$|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(text: str) -> list[str]:
    """All `deltanet-hf ...` command lines of a page: of code blocks, without prompt and comment, and of inline code."""
    blocks = "\n".join(match[2] for match in FENCED.finditer(text))
    prose = FENCED.sub("", text)
    blocks += "\n" + "\n".join(line for line in prose.splitlines() if line.startswith("    "))
    lines = blocks.replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines]
    found = [line for line in found if line.startswith("deltanet-hf ")]
    return found + [" ".join(span.split()) for span in re.findall(r"`(deltanet-hf [^`]+)`", prose)]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 100
    assert len(re.findall(r"\d+(?:[.,]\d+)*", text)) <= 120
    assert max(len(line) for line in lines if not line.startswith(("|", "<!--"))) <= 100
    assert min(number for number, line in enumerate(lines, 1) if line.startswith("deltanet-hf ")) < 30
    table = [line for line in text.partition("<!-- front")[2].splitlines() if line.startswith("|")]
    assert len(table) <= 2 + 7
    assert table[0].count("|") <= 7


def test_user_pages_use_the_words_of_the_field() -> None:
    found = {name(page): HOUSE_WORDS.findall(prose(page)) for page in USER_PAGES}
    assert {page: words for page, words in found.items() if words} == {}


def test_a_sentence_of_a_user_page_has_at_most_three_numbers() -> None:
    for page in USER_PAGES:
        text = re.sub(r"^(?:    |\||#).*$", "", NAME_WITH_NUMBER.sub("", prose(page)), flags=re.MULTILINE)
        for sentence in re.split(r"[.!?]\s+|\n\n|\n- |\n\d\. ", text):
            numbers = re.findall(r"(?<![\w.-])\d[\d.,:]*", sentence)
            assert len(numbers) <= 3, f"{name(page)}: {' '.join(sentence.split())}"


def test_a_page_is_no_longer_than_its_budget() -> None:
    for page, most in WORDS.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        read = re.sub(r"^\|.*$|<!--.*?-->|\]\([^)]*\)", "", text, flags=re.MULTILINE)
        assert len(read.split()) <= most, page


def links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), link
        if anchor:
            assert anchor in anchors(linked), link


def command_lines_parse(text: str) -> None:
    for line in command_lines(text):
        words = shlex.split(line, comments=True)[1:]
        if not words or words[0] == "--help":
            continue
        assert words[0] in COMMANDS, line
        command = typer.main.get_command(build_app(words[0])).commands[words[0]]  # type: ignore[attr-defined]
        options = {"--help"} | {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        if all(word.startswith("-") for word in words[1:]):  # a mention: `deltanet-hf convert`, `... convert --layers`
            assert options.issuperset(words[1:]), line
            continue
        try:
            command.make_context(words[0], words[1:]).close()
        except UsageError as error:
            pytest.fail(f"{line}: {error}")


def recipes_modules_and_scripts_exist(text: str) -> None:
    for line in command_lines(text):
        words = shlex.split(line, comments=True)
        if words[1] in ("align", "distill") and len(words) > 2 and re.fullmatch(r"[a-z0-9.-]+", words[2]):
            assert words[2] in shipped_recipes() or words[2].endswith(".yaml"), line
    for module in re.findall(r"python -m\s+((?:deltanet_|measuring)[\w.]*\w)", text):
        assert importlib.util.find_spec(module) is not None, module
    for benchmark in re.findall(r"python -m\s+measuring\.kernels ([a-z_]+)", text):
        assert benchmark in NAMES, benchmark
    for script in re.findall(r"python (tools/\w+\.py)", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_exists(page: Path) -> None:
    links_lead_somewhere(page)
    text = page.read_text(encoding="utf-8")
    command_lines_parse(text)
    recipes_modules_and_scripts_exist(text)


def test_the_rule_in_pytorch_is_the_operator() -> None:
    """The loop over tokens of docs/gated-deltanet.md gives what the operator gives in chunks."""
    match = RULE.search((ROOT / "docs/gated-deltanet.md").read_text(encoding="utf-8"))
    place: dict[str, Any] = {}
    exec(compile(match[1], "docs/gated-deltanet.md", "exec"), place)
    assert len([line for line in match[1].splitlines() if line]) <= 31
    torch.testing.assert_close(place["chunked"][0], place["output"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(place["last"][0], place["state"], rtol=1e-4, atol=1e-5)
    assert place["output"].abs().mean() > 0.01


def test_the_examples_of_the_operators_run() -> None:
    """Every section on an operator has one, which compares it with something simpler; each continues the one before."""
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    sections = {name: FENCED.search(text, text.index(f"\n## {name}\n")) for name in OPERATOR.findall(text)}
    assert len(sections) == 6
    torch.manual_seed(0)
    place: dict[str, Any] = {}
    for operator, example in sections.items():
        assert f"import {operator}\n" in example[2]
        assert "assert_close(" in example[2]
        exec(compile(example[2], f"docs/kernels.md: {operator}", "exec"), place)


def test_the_site_has_every_page() -> None:
    named = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md"))


def test_the_site_takes_nothing_from_the_network() -> None:
    assert re.findall(r"https?://\S+", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")) == [REPOSITORY]


def test_links_of_the_site_to_files_outside_lead_to_the_repository() -> None:
    text = "[a](../../examples/x.sh#L2) [b](../concepts.md#glossary) [c](https://a.b/c) [d](#e)"
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="research/reproducing.md"))
    seen = on_page_markdown(text, page=page, config=types.SimpleNamespace(repo_url=REPOSITORY))
    assert seen == text.replace("../../examples", f"{REPOSITORY}/blob/main/examples")


def test_what_the_api_page_names_exists() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for module, _, member in (each.rpartition(".") for each in names):
        assert getattr(importlib.import_module(module), member).__doc__, member
    exported = [
        f"{package.__name__}.api.{each}" for package in (deltanet_convert, deltanet_recipes) for each in package.__all__
    ]
    assert set(exported) <= set(names)


@pytest.fixture
def relu_attention(monkeypatch: pytest.MonkeyPatch) -> type[Mixer]:
    """The mixer of docs/contributing.md, registered."""
    match = EXAMPLE.search((ROOT / "docs/contributing.md").read_text(encoding="utf-8"))
    assert max(map(len, match[1].splitlines())) <= 120  # as `ruff check` wants it of a copy
    module = types.ModuleType("relu_attention_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(match[1], "docs/contributing.md", "exec"), vars(module))
    mixer: type[Mixer] = vars(module)["ReluAttention"]
    monkeypatch.setitem(MIXERS, mixer.name, mixer)
    return mixer


def test_the_example_of_a_mixer_works(relu_attention: type[Mixer]) -> None:
    model = tiny_student("llama", mixer=relu_attention.name)
    assert isinstance(model.model.layers[0].self_attn, relu_attention)
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    batch = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(batch[:1, 11:], model.generate(tokens[:1, 4:], **options)[:, 7:])
    cached = model.generate(tokens, return_dict_in_generate=True, output_logits=True, **options)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.stack(cached.logits, 1), model(cached.sequences).logits[:, 10:-1], rtol=2e-4, atol=2e-4
        )
        parts = torch.cat([model(tokens[:1, :5]).logits, model(tokens[:1, 5:]).logits], 1)
        positions = torch.cat([torch.arange(5), torch.arange(6)]).unsqueeze(0)
        packed = model(tokens[:1], position_ids=positions).logits
    torch.testing.assert_close(packed, parts, rtol=2e-4, atol=2e-4)
