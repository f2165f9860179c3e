"""The reader of text files: every format gives the same documents, reading is bounded, errors are one line."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from deltanet_hf.data import text_files
from deltanet_hf.data.text_files import TextFile, text_format
from deltanet_hf.errors import UserError

DOCUMENTS = ["First document.", "Second, with a line\nbreak.", "Third: 1 2 3."]


def write(path: Path) -> Path:
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n\n" for text in DOCUMENTS).encode()
    if path.suffix == ".parquet":
        parquet.write_table(pa.table({"text": DOCUMENTS, "id": [1, 2, 3]}), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".xz":
        path.write_bytes(lzma.compress(lines))
    else:
        path.write_bytes(lines)
    return path


def test_every_kind_with_keys_gives_the_same_documents(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.json.xz", "a.parquet"):
        file = TextFile(write(tmp_path / name))
        assert list(file.documents()) == DOCUMENTS
        assert list(file.values()) == DOCUMENTS
        assert [set(record) for record in file.records()] == [{"text", "id"}] * 3


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    text = "\n\n".join(DOCUMENTS)
    for name in ("a.txt", "a.md", "wiki.test.tokens", "a.raw", "a.txt.gz", "a.md.xz"):
        pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
        (tmp_path / name).write_bytes(pack(text.encode()))
        assert list(TextFile(tmp_path / name).documents()) == [text]
        assert list(TextFile(tmp_path / name).documents(5)) == ["First"]


def test_null_values_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "b"}\n')
    assert list(TextFile(tmp_path / "a.jsonl").documents()) == ["b"]


def test_reading_ends_when_enough_was_read(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000})
    (tmp_path / "a.jsonl").write_text("\n".join([line] * 3 + ["not JSON, and never reached"]))
    assert [len(document) for document in TextFile(tmp_path / "a.jsonl").documents(2500)] == [1000, 1000, 500]


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_LINE", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "b"}\n{"text": "' + "x" * 200)
    with pytest.raises(UserError, match="line 2 has 100 characters or more"):
        list(TextFile(tmp_path / "a.jsonl").documents())


DAMAGED: list[tuple[str, bytes | None, str]] = [
    ("missing.txt", None, "no such file"),
    ("missing.parquet", None, "no such file"),
    ("a.csv", b"a,b", "unknown kind '.csv'"),
    ("a.parquet.gz", b"a", "unknown kind '.gz'"),
    ("a.txt", b" \n ", "holds no text"),
    ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
    ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    ("a.jsonl", b'{"text": "\\u00e9"}\n{"text": "\\ud83d"}', "line 2 is not Unicode text (surrogates"),
    ("a.jsonl", b'{"content": "a"}', "line 1 has no string under key 'text'; set text_key"),
    ("a.jsonl", b'["a"]', "line 1 has no string under key 'text'"),
    ("a.jsonl", b'{"text": 3}', "line 1 has no string under key 'text'"),
    ("a.parquet", b"PAR1 no", "not a parquet file"),
    ("a.jsonl.gz", b"{}", "cannot be read (Not a gzipped file"),
    ("a.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, "cannot be read (Error -3"),
    ("a.txt.xz", b"{}", "cannot be read (Input format"),
]


def test_errors_are_one_line_with_option_and_file(tmp_path: Path) -> None:
    for name, content, message in DAMAGED:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError) as caught:
            list(TextFile(tmp_path / name, option="--text", key_option="text_key").documents())
        assert str(caught.value).startswith(f"--text {tmp_path / name}: ")
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column 'body' \(it has text, id\); rename the key to 'body'"):
        list(TextFile(write(tmp_path / "a.parquet"), key="body").documents())


def test_formats_go_by_name() -> None:
    names = ["a.txt", "a.md.gz", "a.jsonl.xz", "a.json", "a.parquet", "a.npy", "a", "a.gz"]
    found = [text_format(Path(name)) for name in names]
    assert found == ["text", "text", "jsonl", "jsonl", "parquet", None, None, None]
