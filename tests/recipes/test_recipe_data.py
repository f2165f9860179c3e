"""Sources, the token cache, packing, mixtures and decontamination."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from deltanet_hf.errors import UserError
from deltanet_recipes.data import tokens
from deltanet_recipes.data.decontaminate import Contamination
from deltanet_recipes.data.packing import Mixture, make_rows, split_streams
from deltanet_recipes.data.tokens import Corpus, load_corpus
from deltanet_recipes.schema_sections import Source
from support.tiny_run import CHAT_TEMPLATE, make_tokenizer

EOS = 2
LINES = [{"text": "w1 w2 w3"}, {"text": "w4 w5"}]
IDS = [5, 6, 7, EOS, 8, 9, EOS]


def load(tmp_path: Path, source: Source, **kwargs: Any) -> Corpus:
    return load_corpus(source, make_tokenizer(), EOS, tmp_path / "cache", **kwargs)


def write(path: Path) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(text.encode()))
    elif path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(LINES), path)
    elif path.suffix == ".npy":
        np.save(path, np.array(IDS, dtype=np.uint16))
    else:
        path.write_text(text)
    return path


def test_every_file_type_gives_the_same_tokens(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet", "a.npy"):
        corpus = load(tmp_path, Source(path=str(write(tmp_path / name))))
        assert corpus.tokens.tolist() == IDS
        assert corpus.starts.tolist() == [0, 4, 7]


def test_text_files_are_cut_into_documents_of_whole_paragraphs(tmp_path: Path) -> None:
    paragraphs = [f"w{i} " * 1000 for i in range(8)]
    (tmp_path / "a.txt").write_text("\n\n".join(paragraphs))
    corpus = load(tmp_path, Source(path=str(tmp_path / "a.txt")))
    assert len(corpus.starts) - 1 > 1
    assert [t for t in corpus.tokens.tolist() if t != EOS] == [4 + i for i in range(8) for _ in range(1000)]


def test_second_use_reads_the_cache_and_a_change_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl")
    load(tmp_path, Source(path=str(path)))
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "_build", lambda *args: pytest.fail("a corpus that is there is made again"))
        other = load(tmp_path, Source(path=str(path), weight=3))
        assert other.tokens.tolist() == IDS
        assert other.report["source"]["weight"] == 3
    assert load(tmp_path, Source(path=str(path), max_tokens=5)).tokens.tolist() == IDS[:5]


def test_a_damaged_corpus_is_made_again(tmp_path: Path) -> None:
    source = Source(path=str(write(tmp_path / "a.jsonl")))
    load(tmp_path, source)
    for name in ("meta.json", "starts.npy", "tokens.bin"):
        (file,) = (tmp_path / "cache").glob(f"*/{name}")
        for size in (0, file.stat().st_size // 2):
            file.write_bytes(file.read_bytes()[:size])
            assert load(tmp_path, source).tokens.tolist() == IDS


def test_errors_name_file_and_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"line 1 has no string under key 'body'; set text_key"):
        load(tmp_path, Source(path=str(path), text_key="body"))
    for odd in (60000, -1):
        np.save(tmp_path / "b.npy", np.array([1, odd]))
        with pytest.raises(UserError, match=rf"id {odd} is outside the vocabulary of \d+; give ids of"):
            load(tmp_path, Source(path=str(tmp_path / "b.npy")))


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    for name, content, said in (
        ("a.parquet", b"PAR", "a.parquet: not a parquet file (Parquet file size is 3 bytes"),
        ("a.txt", b"\xff\xfe", "a.txt: is not UTF-8 text (invalid start byte)"),
        ("a.jsonl.gz", b"{}", "a.jsonl.gz: cannot be read (Not a gzipped file"),
        ("a.jsonl.xz", b"{}", "a.jsonl.xz: cannot be read (Input format"),
        ("a.npy.xz", b"{}", "a.npy.xz: not a NumPy array"),
        ("a.jsonl", b'{"text": 5}', "a.jsonl: line 1 has no string under key 'text'; set text_key"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            load(tmp_path, Source(path=str(tmp_path / name)))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_chat_that_the_template_refuses_is_one_line(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"m": chat}))
    source = Source(path=str(tmp_path / "a.jsonl"), messages_key="m")
    with pytest.raises(UserError, match=r"^data: .* the roles user \(roles must alternate\); leave such chats out$"):
        load_corpus(source, tokenizer, EOS, tmp_path / "cache")


def test_chats_without_a_reply_are_skipped(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    asked = [{"role": "user", "content": "w1"}]
    source = Source(path=str(tmp_path / "a.jsonl"), messages_key="m")
    (tmp_path / "a.jsonl").write_text(json.dumps({"m": asked}) + "\n")
    with pytest.raises(UserError, match="no text in it, and no chat with a reply"):
        load_corpus(source, tokenizer, EOS, tmp_path / "cache")
    chats = (asked, [], [*asked, {"role": "assistant", "content": "w2"}])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"m": chat}) + "\n" for chat in chats))
    assert load_corpus(source, tokenizer, EOS, tmp_path / "cache").report["documents"] == 1


def test_chats_without_roles_are_refused(tmp_path: Path) -> None:
    for chat in ([{"content": "w1"}], "w1", [{"role": "user"}], None):
        (tmp_path / "a.jsonl").write_text(json.dumps({"m": chat}))
        with pytest.raises(UserError, match="each with a role and a content"):
            load(tmp_path, Source(path=str(tmp_path / "a.jsonl"), messages_key="m"))


def test_null_texts_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "w1"}\n')
    assert load(tmp_path, Source(path=str(tmp_path / "a.jsonl"))).tokens.tolist() == [5, EOS]


def test_documents_without_a_group_are_not_pieces_of_one_text(tmp_path: Path) -> None:
    lines = [{"text": f"w{i}", "g": group} for i, group in enumerate((None, None, "a", "a"))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus = load(tmp_path, Source(path=str(tmp_path / "a.jsonl"), group_key="g", join_groups=True))
    assert corpus.starts.tolist() == [0, 2, 4, 7]


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_data_sets_are_read_up_to_their_share_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """`datasets` reads a folder as it reads a data set on the Hub, which tests cannot reach."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl")
    source = Source(hub=str(tmp_path / "set"), streaming=streaming, max_tokens=6)
    assert load(tmp_path, source).tokens.tolist() == IDS[:6]
    with pytest.raises(UserError, match="no field 'body'; it has text; set text_key"):
        load(tmp_path, source.model_copy(update={"text_key": "body"}))
    with pytest.raises(UserError, match=r"^data source no/such: cannot be read: [^\n]*Hub[^\n]*$"):
        load(tmp_path, Source(hub="no/such", streaming=streaming, max_tokens=6))


def corpus_of(*documents: list[int], weight: float = 1.0, label: str = "c") -> Corpus:
    starts = np.cumsum([0, *(len(d) for d in documents)])
    return Corpus(label, weight, np.concatenate([np.array(d) for d in documents]), None, starts, {})


def mixture(*corpora: Corpus, isolate: bool = True, repeat: bool = True, holdout: int = 0) -> Mixture:
    training, _ = split_streams(corpora, holdout, seed=1, shuffle=True)
    return Mixture(training, EOS, isolate, repeat)


def test_positions_restart_and_ends_are_not_scored() -> None:
    ids = np.array([[5, 6, EOS, 7, 8, 9]])
    rows = make_rows(ids, np.ones_like(ids, dtype=bool), EOS, isolate=True)
    assert rows.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert rows.labels.tolist() == [[6, EOS, -100, 8, 9]]
    joined = make_rows(ids, np.ones_like(ids, dtype=bool), EOS, isolate=False)
    assert joined.position_ids.tolist() == [[0, 1, 2, 3, 4]]


def test_rows_from_within_a_document_begin_as_documents_do() -> None:
    begin = 4
    documents = [[begin, *range(10, 19), EOS], [begin, *range(20, 24), EOS]]
    training, _ = split_streams([corpus_of(*documents)], 0, seed=0, shuffle=False)
    rows = Mixture(training, EOS, True, True, begin).take(3, 6)
    assert rows.input_ids.tolist() == [
        [begin, 10, 11, 12, 13, 14],
        [begin, 15, 16, 17, 18, EOS],
        [begin, 20, 21, 22, 23, EOS],
    ]
    assert rows.labels.tolist() == [
        [10, 11, 12, 13, 14, 15],
        [-100, 16, 17, 18, EOS, -100],  # what follows a begin that was put there cannot be known
        [-100, 21, 22, 23, EOS, -100],
    ]


def test_documents_get_the_token_that_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    source, tokenizer = Source(path=str(write(tmp_path / "a.jsonl"))), make_tokenizer()
    begin = tokenizer.bos_token_id
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    corpus = load_corpus(source, tokenizer, EOS, tmp_path / "cache")
    assert corpus.tokens.tolist() == [begin, *IDS[:4], begin, *IDS[4:]]
    assert load(tmp_path, source).tokens.tolist() == IDS  # not from the cache of the other


def test_state_resumes_exactly_also_with_other_row_lengths() -> None:
    documents = [[10 + i] * (5 + i) + [EOS] for i in range(12)]
    one, two = mixture(corpus_of(*documents)), mixture(corpus_of(*documents))
    one.take(7, 9)
    two.state = list(one.state)
    assert torch.equal(one.take(5, 16).input_ids, two.take(5, 16).input_ids)


def test_one_epoch_has_every_token_once_and_the_next_is_in_another_order() -> None:
    documents = [[10 + i] * 7 + [EOS] for i in range(8)]
    source = mixture(corpus_of(*documents))
    first, second = source.take(8, 8).input_ids.flatten(), source.take(8, 8).input_ids.flatten()
    assert sorted(first.tolist()) == sorted(t for d in documents for t in d)
    assert sorted(second.tolist()) == sorted(first.tolist())
    assert first.tolist() != second.tolist()


def test_weights_hold_for_every_prefix() -> None:
    source = mixture(corpus_of([5] * 64, [5] * 64, weight=3), corpus_of([6] * 64, [6] * 64, weight=1))
    ids = source.take(40, 4).input_ids[:, 0]
    for rows in range(1, 41):
        assert abs(int((ids[:rows] == 5).sum()) - 0.75 * rows) <= 1


def test_held_out_documents_are_never_trained_on() -> None:
    documents = [[10 + i] * 7 + [EOS] for i in range(10)]
    training, held_out = split_streams([corpus_of(*documents)], 16, seed=0, shuffle=True)
    seen = set(Mixture(training, EOS, True, True).take(40, 8).input_ids.flatten().tolist())
    kept = set(Mixture(held_out, EOS, True, True).take(4, 8).input_ids.flatten().tolist())
    assert kept == {18, 19, EOS}
    assert seen & kept == {EOS}


@pytest.mark.parametrize(("documents", "remedy"), [(1, "split it, or set"), (2, "lower")])
def test_too_few_documents_to_hold_some_out(documents: int, remedy: str) -> None:
    with pytest.raises(UserError, match=f"{documents} documents, .* hold out 70 tokens, .*; {remedy} data.holdout"):
        split_streams([corpus_of(*[[5] * 64] * documents)], 70, seed=0, shuffle=True)


def test_running_out_of_tokens_is_refused_before_training() -> None:
    source = mixture(corpus_of([5] * 64, [5] * 64, label="small"), repeat=False)
    source.check(100)
    with pytest.raises(UserError, match="128 beside the held-out ones"):
        source.check(128)


def test_documents_that_share_thirteen_tokens_are_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    shared = " ".join(f"w{i}" for i in range(13))
    short = " ".join(f"w{i}" for i in range(12))
    with open(tmp_path / "a.jsonl", "w") as file:
        for text in (f"w50 {shared} w51", f"{short} w58", "w30 w31"):
            file.write(json.dumps({"text": text}) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "x", "choices": [f"w40 {shared} w41"]}) + "\n")
    contamination = Contamination([str(tmp_path / "test.jsonl")], tokenizer)
    corpus = load(tmp_path, Source(path=str(tmp_path / "a.jsonl")), contamination=contamination)
    assert corpus.report["documents_contaminated"] == 1
    assert corpus.report["documents"] == 2
    assert 4 + 58 in corpus.tokens.tolist()


def test_evaluation_texts_of_every_kind_are_read(tmp_path: Path) -> None:
    """By their paths, and by those of their folders."""
    shared = " ".join(f"w{i}" for i in range(13))
    rows = [{"question": "w1", "options": {"label": "A", "text": [shared]}}]
    for name in ("wiki.test.tokens", "a.txt", "a.jsonl.gz", "a.parquet", "a.npy"):
        path = tmp_path / name.rpartition(".")[2] / name
        path.parent.mkdir()
        if name.endswith(".parquet"):
            parquet.write_table(pa.Table.from_pylist(rows), path)
        elif name.endswith(".npy"):
            np.save(path, np.arange(4, 17))
        elif name.endswith(".gz"):
            path.write_bytes(gzip.compress(json.dumps(rows[0]).encode()))
        else:
            path.write_text(f"= w50 = \n {shared} \n")
        for given in (path.parent, path):
            contamination = Contamination([str(given)], make_tokenizer())
            assert contamination.touched(np.array([60, *range(4, 17), 61])) == [f"{path.parent.name}/{name}"]
            assert not contamination.touched(np.array([60, *range(5, 17), 61]))


def test_evaluation_texts_behind_links_count(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "linked").symlink_to(tmp_path / "own")
    before = Contamination([str(tmp_path / "eval")], make_tokenizer()).fingerprint
    (tmp_path / "own" / "a.txt").write_text(" ".join(f"w{i}" for i in range(13)))
    contamination = Contamination([str(tmp_path / "eval")], make_tokenizer())
    assert contamination.fingerprint != before
    assert contamination.touched(np.arange(4, 17)) == ["eval/linked"]


def test_an_evaluation_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_text("{}")
    with pytest.raises(UserError, match=r"data\.decontaminate: .*a\.jsonl\.gz: cannot be read"):
        Contamination([str(tmp_path / "a.jsonl.gz")], make_tokenizer()).touched(np.arange(13))


def test_chat_completions_alone_are_scored(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    source = Source(path=str(tmp_path / "a.jsonl"), messages_key="messages")
    corpus = load_corpus(source, tokenizer, EOS, tmp_path / "cache")
    scored = [tokenizer.convert_ids_to_tokens(int(t)) for t, s in zip(corpus.tokens, corpus.scored, strict=True) if s]
    assert scored == ["w2", "w3", "w52"]
