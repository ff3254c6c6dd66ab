"""Corpora: documents of text or token ids, read from whatever holds them; nothing here knows of tokenizers.

A document is the unit of everything that follows: sequences never straddle two of them, and they are the clusters of
the bootstrap, so what counts as one document is fixed by the kind of source (see `corpus`) and never guessed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pavinterp.arguments import require_whole
from pavinterp.errors import UserError

Ids = npt.NDArray[np.int64]
Document = tuple[str, str | Ids]

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Documents before tokenisation: all texts, or all ready token ids (int64 vectors)."""

    source: str
    documents: list[Document]  # (name, text or ids)
    words: tuple[str, ...] | None = field(default=None, compare=False)  # of the command line that read it; see `corpus`


def corpus(source: Any = "demo", *, text_field: str = "text", max_documents: int | None = None) -> Corpus:
    """The documents of `source`, in their order there; at most the first `max_documents`.

    | source | one document is |
    |---|---|
    | `"demo"` | one of the excerpts embedded in the package (`"./demo"` for a folder of that name) |
    | `.txt` file | the file |
    | folder | one of its `.txt` files, those in folders below included, sorted by path |
    | `.jsonl` file | the text under `text_field` on one line |
    | `.parquet` file | the text under `text_field` in one row |
    | `"-"` | all of standard input |
    | `"hf:NAME[/CONFIG][:SPLIT]"` | the text under `text_field` in one row (needs the `datasets` package) |
    | list of strings | one string |
    | token ids: list, array or tensor | all of it if 1-D; one row if 2-D or a list of lists (which may be ragged) |

    `hf:`: SPLIT is `train` unless given; three parts are org/name/config; two parts are tried as org/name, then, where
    the hub has no such dataset, as name/config. With `max_documents` only those rows are fetched, without it the
    whole split.

    Text is UTF-8; a byte-order mark is removed and line ends become newlines. Documents without text are left out.
    Raises UserError, one line, for everything that cannot be read.
    """
    if isinstance(source, Corpus):
        return source
    if max_documents is not None:
        require_whole("max_documents", max_documents, 1)
    words: tuple[str, ...] | None = None  # what is in memory cannot be typed
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        words = ("--corpus", name)
        words += ("--text-field", text_field) if text_field != "text" else ()
        words += ("--max-documents", str(max_documents)) if max_documents is not None else ()
        documents: Iterable[Document] = _documents(name, text_field, max_documents)
    else:
        name, documents = _in_memory(source)
    if max_documents is not None:
        max_documents = min(max_documents, sys.maxsize)
    found = list(islice((d for d in documents if not isinstance(d[1], str) or d[1].strip()), max_documents))
    if not found:
        raise UserError(f"corpus {name} is empty: it holds no text and no token ids")
    return Corpus(name, found, words)


def _documents(source: str, field: str, limit: int | None) -> Iterator[Document]:
    if source == "demo":
        return _demo()
    if source == "-":
        return iter([("standard input", _standard_input())])
    if source.startswith("hf:"):
        return _hub(source, field, limit)
    path = Path(source)
    try:
        os.stat(source)  # of the string itself: Path("") is the folder we are in
    except (OSError, ValueError) as error:  # ValueError: a null character, so this was never a path
        shown = source if len(source) <= 80 else source[:77] + "..."
        raise UserError(
            f"cannot read corpus {shown!r} ({getattr(error, 'strerror', None) or error}); give a file, a folder, demo, "
            "- or hf:NAME (in Python, text itself goes into a list: [text])"
        ) from error
    if path.is_dir():
        return _folder(path)
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _jsonl(path, field)
    if suffix == ".parquet":
        return _parquet(path, field)
    if suffix == ".txt":
        return iter([(path.name, _decode(_bytes(path), str(path)))])
    raise UserError(
        f"corpus {source} has an unknown suffix {suffix!r}; "
        f"accepted are {', '.join(SUFFIXES)}, a folder of .txt files, - and hf:NAME"
    )


def _demo() -> Iterator[Document]:
    folder = resources.files("pavinterp") / "demo" / "text"
    if not folder.is_dir():
        raise UserError("the embedded text is missing from this installation of pavinterp; install it again")
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".txt"):
            yield entry.name, _decode(entry.read_bytes(), entry.name)


def _standard_input() -> str:
    if sys.stdin is None:
        raise UserError("cannot read corpus -: standard input is closed; give a file or a folder")
    binary = getattr(sys.stdin, "buffer", None)  # a notebook's standard input has none
    return _tidy(sys.stdin.read(), "standard input") if binary is None else _decode(binary.read(), "standard input")


def _folder(folder: Path) -> Iterator[Document]:
    files = sorted(
        (path for path in folder.rglob("*") if path.suffix.lower() == ".txt" and path.is_file()),
        key=lambda path: path.relative_to(folder).as_posix(),
    )
    if not files:
        raise UserError(f"folder {folder} holds no .txt file, and a folder is read as one document a .txt file")
    for path in files:
        yield path.relative_to(folder).as_posix(), _decode(_bytes(path), str(path))


def _jsonl(path: Path, field: str) -> Iterator[Document]:
    offset = 0
    with _opened(path) as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path}, line {number}"
            line = _decode(raw, where, offset)
            offset += len(raw)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{where}: expected an object with a field {field!r}, got {type(row).__name__}")
            yield f"{path.name}:{number}", _row_text(row, field, where)


def _parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise _no_field(f"{path}", field, file.schema_arrow.names)
            if file.schema_arrow.names.count(field) > 1:
                raise UserError(f"{path} has several columns {field!r}: rename them, or name another (--text-field)")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield f"{path.name}#{row}", _row_text({field: value}, field, f"{path}, row {row}")
                    row += 1
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} as Parquet: {_one_line(error)}") from error


def _hub(source: str, field: str, limit: int | None) -> Iterator[Document]:
    name, _, split = source.removeprefix("hf:").partition(":")
    split = split or "train"
    parts = name.split("/")
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise UserError(f"cannot read {source!r}: expected hf:NAME[/CONFIG][:SPLIT] with NAME a dataset or ORG/DATASET")
    candidates = [("/".join(parts[:2]), *parts[2:])]
    if len(parts) == 2:
        candidates.append((parts[0], parts[1]))
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source} needs the datasets package: pip install datasets") from error
    # Streaming takes neither slices of a split nor what the cache holds.
    streaming = limit is not None and "[" not in split and not datasets.config.HF_HUB_OFFLINE
    with _quiet("huggingface_hub"):  # its eleven lines on retries; the error below says it in one
        try:
            rows = _load_dataset(candidates, split=split, streaming=streaming)
            for number, row in enumerate(rows):
                yield f"{name}#{number}", _row_text(row, field, f"{source}, row {number}")
        except UserError:
            raise
        except ConnectionError as error:
            raise UserError(
                f"cannot reach the hub for {source} ({_one_line(error)}); connect, or use a local file or folder"
            ) from error
        except Exception as error:  # whatever a third party's reader and network stack may raise
            raise UserError(f"cannot load {source}: {_one_line(error)}") from error


def _load_dataset(candidates: list[tuple[str, ...]], **options: Any) -> Iterable[dict[str, Any]]:
    """The first of the candidates (name, or name and configuration) that exists; else the first one's error."""
    import datasets

    # Offline, "not in the cache" is a ConnectionError too; online it is the network, and trying on would only wait.
    not_found = datasets.exceptions.DatasetNotFoundError
    absent = (not_found, ConnectionError) if datasets.config.HF_HUB_OFFLINE else (not_found,)
    errors = []
    for candidate in candidates:
        try:
            return datasets.load_dataset(*candidate, **options)
        except absent as error:
            errors.append(error)
    raise errors[0]


def _in_memory(source: Any) -> tuple[str, list[Document]]:
    if isinstance(source, list | tuple):
        if source and all(isinstance(text, str) for text in source):
            return "list of texts", [(f"text[{i}]", _tidy(text, f"text[{i}]")) for i, text in enumerate(source)]
        if any(isinstance(item, str) for item in source):
            raise UserError("a list is all strings or all token ids, and this one is mixed")
        rows = source if any(np.ndim(item) for item in map(_as_array, source)) else [source] if source else []
    elif hasattr(source, "shape"):
        array = _as_array(source)
        if array.ndim not in (1, 2):
            raise UserError(f"token ids must be [tokens] or [documents, tokens], got shape {tuple(array.shape)}")
        rows = [array] if array.ndim == 1 else list(array)
    else:
        raise UserError(
            f"no corpus can be made of {type(source).__name__}: give a path, a list of strings or token ids"
        )
    return "token ids", [(f"tokens[{i}]", ids) for i, row in enumerate(rows) if (ids := _ids(row, f"tokens[{i}]")).size]


def _as_array(value: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:  # a ragged list; a tensor in a type that NumPy lacks
        raise UserError(f"token ids must be whole numbers in one or two dimensions: {_one_line(error)}") from error


def _ids(row: Any, where: str) -> Ids:
    array = _as_array(row)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"{where}: token ids must be a vector of whole numbers, got {array.dtype} of shape {tuple(array.shape)}"
        )
    check_range(array, None, where)
    return array.astype(np.int64)


def _bytes(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def _decode(raw: bytes, where: str, offset: int = 0) -> str:
    """`raw` as UTF-8; `offset`: of its first byte in the file, for the error."""
    try:
        return _tidy(raw.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        found = f"byte 0x{raw[error.start]:02x} at offset {offset + error.start}"
        hint = ", it looks like UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise UserError(f"{where}: not UTF-8 ({found}{hint}); save it as UTF-8") from error


def _tidy(text: str, where: str) -> str:
    """`text` without byte-order mark, its line ends newlines. Lone surrogates are an error: no tokenizer takes them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} is not valid text: half a surrogate pair at character {error.start}; replace it there"
        ) from error
    if "\0" in text:
        raise UserError(
            f"{where} is not text: a NUL character at character {text.index(chr(0))}; if it is UTF-16 without a "
            "byte-order mark, save it as UTF-8"
        )
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _row_text(row: dict[str, Any], field: str, where: str) -> str:
    """The text of one row; an empty one for null, so that gaps in a table are left out like blank texts."""
    if field not in row:
        raise _no_field(where, field, row)
    text = row[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} holds {type(text).__name__}, not text")
    return _tidy(text, where)


def _no_field(where: str, field: str, there: Iterable[str]) -> UserError:
    names = ", ".join(map(str, islice(there, 12))) or "no field at all"
    return UserError(f"{where}: no text field {field!r}; it has {names}: name the one with the text (--text-field)")


def _one_line(error: BaseException, limit: int = 200) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def check_range(ids: npt.NDArray[Any], size: int | None, where: str) -> None:
    """UserError unless token ids lie in a vocabulary of `size` (None: of any size)."""
    wrong = np.flatnonzero((ids < 0) | (ids >= (np.iinfo(np.int64).max if size is None else size)))
    if wrong.size:
        vocabulary = "token ids start at 0" if size is None else f"the vocabulary's are 0 to {size - 1}"
        raise UserError(f"{where}: token id {ids[wrong[0]]} at position {wrong[0]} is out of range ({vocabulary})")
