"""Corpora of every kind, and those that cannot be read."""

import io
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from messages import one_line

from pavinterp.corpora import Corpus, corpus
from pavinterp.errors import UserError


def test_demo_is_the_embedded_text():
    found = corpus()
    assert found.source == "demo"
    names = [name for name, _ in found.documents]
    assert len(names) == 16
    assert names == sorted(names)
    assert all(len(text) > 6000 for _, text in found.documents)


def test_txt_file_is_one_document_tidied(tmp_path):
    path = tmp_path / "a.TXT"
    path.write_bytes("\ufeffeins\r\nzwei\rdrei\n\nvier ü".encode())
    assert corpus(path) == Corpus(str(path), [("a.TXT", "eins\nzwei\ndrei\n\nvier ü")])
    assert corpus(str(path)).documents == corpus(path).documents


def test_folder_is_read_below_and_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "dir.txt").mkdir()
    for name in ("b.txt", "a.txt", "sub/a.txt", "notes.md", "blank.txt"):
        (tmp_path / name).write_text("  \n" if name == "blank.txt" else name)
    found = corpus(tmp_path)
    assert found.documents == [("a.txt", "a.txt"), ("b.txt", "b.txt"), ("sub/a.txt", "sub/a.txt")]
    assert corpus(tmp_path, max_documents=2).documents == found.documents[:2]


def test_jsonl_is_one_document_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "one\\r\\n"}\r\n\r\n{"body": null}\n{"body": " "}\n{"body": "two", "n": 3}')
    assert corpus(path, text_field="body").documents == [("rows.jsonl:1", "one\n"), ("rows.jsonl:5", "two")]


def test_max_documents_stops_reading(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\nnot JSON\n')
    assert [text for _, text in corpus(path, max_documents=2).documents] == ["one", "two"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_is_one_document_a_row(tmp_path, kind):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": [1, 2, 3], "text": pa.array(["one", None, "two"]).cast(kind)}), path)
    assert corpus(path).documents == [("rows.parquet#0", "one"), ("rows.parquet#2", "two")]


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ein Wört\r\n".encode())))
    assert corpus("-") == Corpus("-", [("standard input", "ein Wört\n")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("no buffer"))
    assert corpus("-").documents == [("standard input", "no buffer")]


def test_strings_are_documents():
    assert corpus(["one\r\n", "", "two"]).documents == [("text[0]", "one\n"), ("text[2]", "two")]
    assert corpus(("one",)).documents == [("text[0]", "one")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ([1, 2, 3], [[1, 2, 3]]),
        (np.array([1, 2, 3], np.uint16), [[1, 2, 3]]),
        (torch.tensor([1, 2, 3]), [[1, 2, 3]]),
        ([torch.tensor(1), torch.tensor(2)], [[1, 2]]),
        ([[1, 2, 3], [4], []], [[1, 2, 3], [4]]),
        (torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), [[1, 2], [3, 4]]),
        ([np.array([1, 2]), torch.tensor([3])], [[1, 2], [3]]),
    ],
)
def test_token_ids_are_one_document_or_one_a_row(source, expected):
    found = corpus(source)
    assert found.source == "token ids"
    assert [ids.tolist() for _, ids in found.documents] == expected
    assert all(ids.dtype == np.int64 for _, ids in found.documents)


def test_a_corpus_stays_itself():
    found = corpus(["text"])
    assert corpus(found) is found


def test_hub_reads_through_datasets(tmp_path, monkeypatch):
    # A folder of this name counts as a dataset, so all of it runs with no network.
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "test.jsonl").write_text("".join(json.dumps({"body": f"row {i}"}) + "\n" for i in range(5)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    rows = [(f"mine#{i}", f"row {i}") for i in range(5)]
    assert corpus("hf:mine:test", text_field="body").documents == rows
    assert corpus("hf:mine:test", text_field="body", max_documents=2).documents == rows[:2]
    assert corpus("hf:mine:test[1:3]", text_field="body", max_documents=9).documents == [
        ("mine#0", "row 1"),
        ("mine#1", "row 2"),
    ]
    with pytest.raises(UserError, match=r"no text field 'text'; it has body: name") as error:
        corpus("hf:mine:test")
    one_line(error)
    with pytest.raises(UserError, match=r"cannot load hf:mine: .*train"):
        corpus("hf:mine")


@pytest.mark.parametrize(
    ("spec", "there", "calls"),
    [
        ("hf:imdb:test", "imdb", ["imdb"]),
        ("hf:org/name:test", "org/name", ["org/name"]),
        ("hf:wikitext/wikitext-2-v1:test", "wikitext", ["wikitext/wikitext-2-v1", "wikitext+wikitext-2-v1"]),
        ("hf:org/name/config:test", "org/name", ["org/name+config"]),
    ],
)
def test_hub_names(monkeypatch, spec, there, calls):
    import datasets

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    seen = []

    def load_dataset(name, *config, split, streaming):
        seen.append(("+".join([name, *config]), split, streaming))
        if name != there:
            raise datasets.exceptions.DatasetNotFoundError(f"{name} doesn't exist")
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(corpus(spec).documents) == 2
    assert seen == [(call, "test", False) for call in calls]
    seen.clear()
    assert len(corpus(spec, max_documents=1).documents) == 1
    assert seen == [(call, "test", True) for call in calls]
    seen.clear()
    assert len(corpus(spec.removesuffix(":test")).documents) == 2
    assert seen == [(call, "train", False) for call in calls]


def test_hub_without_network_says_so_in_one_line_and_tries_once(monkeypatch, caplog):
    import datasets

    tries = []

    def load_dataset(name, *config, **options):
        tries.append(name)
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s")
        raise ConnectionError(f"Couldn't reach '{name}'\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    with pytest.raises(
        UserError, match=r"cannot reach the hub for hf:org/name .*connect, or use a local file"
    ) as error:
        corpus("hf:org/name")
    one_line(error)
    assert tries == ["org/name"]
    assert not caplog.records
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="cannot reach the hub"):
        corpus("hf:org/name")
    assert tries == ["org/name", "org/name", "org"]  # the cache may hold the second reading


def test_hub_names_the_dataset_that_is_missing(monkeypatch):
    import datasets

    def load_dataset(name, *config, **options):
        raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UserError, match="cannot load hf:org/name: Dataset 'org/name' doesn't exist"):
        corpus("hf:org/name")


@pytest.mark.parametrize("spec", ["hf:", "hf:/name", "hf:a/b/c/d", "hf:a//b"])
def test_hub_names_that_are_none(spec):
    with pytest.raises(UserError, match="expected hf:NAME"):
        corpus(spec)


def test_hub_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        corpus("hf:imdb")


# --- corpora that cannot be read ---


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "schön".encode("latin1"), r"latin.txt: not UTF-8 \(byte 0xf6 at offset 3\); save it as UTF-8"),
        ("bom.txt", b"\xef\xbb\xbfab\xff", r"bom.txt: not UTF-8 \(byte 0xff at offset 5\)"),
        ("wide.txt", "text".encode("utf-16"), r"wide.txt: not UTF-8 \(.*it looks like UTF-16\)"),
        ("empty.txt", "", "empty.txt is empty: it holds no text"),
        ("blank.txt", "\ufeff \n\t\r\n", "blank.txt is empty"),
        ("empty.jsonl", "\n\n", "empty.jsonl is empty"),
        ("bad.jsonl", '{"text": "a"}\n{"text": \n', r"bad.jsonl, line 2: not JSON"),
        ("deep.jsonl", "[" * 100_000, r"deep.jsonl, line 1: not JSON"),
        ("list.jsonl", '["a"]', r"list.jsonl, line 1: expected an object with a field 'text', got list"),
        (
            "field.jsonl",
            '{"text": "a"}\n\n{"body": "b", "n": 1}',
            r"line 3: no text field 'text'; it has body, n: name the",
        ),
        ("object.jsonl", "{}", r"line 1: no text field 'text'; it has no field at all"),
        ("type.jsonl", '{"text": 3}', r"line 1: field 'text' holds int, not text"),
        ("half.jsonl", r'{"text": "a\ud800"}', r"line 1 is not valid text: half a surrogate pair at character 1"),
        ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe4"}', r"line 2: not UTF-8 \(byte 0xe4 at offset 24\)"),
        ("bad.parquet", "PAR1 not so", r"cannot read .*bad.parquet as Parquet"),
        ("model.bin", "x", r"model.bin has an unknown suffix '.bin'; accepted are .txt, .jsonl, .parquet, a folder"),
        ("README", "x", r"README has an unknown suffix ''"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as error:
        corpus(write(tmp_path / name, content))
    one_line(error)


def test_missing_sources():
    for source in ("no/such/file.txt", "Some text that is no path. " * 40, "null\0character", ""):
        with pytest.raises(UserError, match=r"cannot read corpus .*text itself goes into a list") as error:
            corpus(source)
        one_line(error)


def test_folder_without_text(tmp_path):
    write(tmp_path / "notes.md", "x")
    with pytest.raises(UserError, match=r"holds no .txt file") as error:
        corpus(tmp_path)
    one_line(error)


@pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="needs a file that exists and cannot be read, even by root"
)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "parquet"])
def test_unreadable_file(tmp_path, suffix):
    path = tmp_path / f"memory.{suffix}"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"cannot read .*memory\.") as error:
        corpus(path)
    one_line(error)


def test_parquet_with_two_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="several columns 'text'") as error:
        corpus(tmp_path / "a.parquet")
    one_line(error)


def test_parquet_without_the_field_or_with_numbers_there(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": [1], "body": ["a"]}), path)
    with pytest.raises(UserError, match=r"rows.parquet: no text field 'text'; it has n, body") as error:
        corpus(path)
    one_line(error)
    with pytest.raises(UserError, match=r"rows.parquet, row 0: field 'n' holds int, not text"):
        corpus(path, text_field="n")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="is empty"):
        corpus(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "is empty"),
        ([[]], "is empty"),
        ([" ", ""], "is empty"),
        (["a", 1], "mixed"),
        ([1, [2, 3]], "must be a vector of whole numbers"),
        ([[[1, 2]]], "must be a vector of whole numbers"),
        ([1.5, 2.0], "whole numbers, got float64"),
        ([True, False], "whole numbers, got bool"),
        (torch.rand(4), "whole numbers, got float32"),
        (torch.rand(4).bfloat16(), "whole numbers"),
        (torch.zeros(2, 2, 2, dtype=torch.int64), r"got shape \(2, 2, 2\)"),
        (torch.tensor(3), r"got shape \(\)"),
        ([3, -1], r"token id -1 at position 1 is out of range \(token ids start at 0\)"),
        (["a\ud800"], "half a surrogate pair"),
        (3, "no corpus can be made of int"),
        (None, "no corpus can be made of NoneType"),
    ],
)
def test_objects_that_are_no_corpus(source, message):
    with pytest.raises(UserError, match=message) as error:
        corpus(source)
    one_line(error)


def test_closed_standard_input_and_a_limit_of_none(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        corpus("-")
    with pytest.raises(UserError, match="max_documents must be a whole number of at least 1"):
        corpus(["a"], max_documents=0)
