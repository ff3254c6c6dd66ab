"""From text or token ids to the token sequences a model is shown: reading corpora, cutting sequences, random repeats.

A document is the unit of everything here: sequences never straddle two of them, and they are the clusters of the
bootstrap, so what counts as one document is fixed by the kind of source (see `corpus`) and never guessed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pavinterp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int64]
Document = tuple[str, str | Ids]

SUFFIXES = (".txt", ".jsonl", ".parquet")
BOS_POLICIES = ("auto", "always", "never")
MIN_TOKENS = 8  # a sequence shorter than this says nothing about how load grows with context
_FIRST_READ = 2**16  # characters of a document encoded at first; doubled until there are tokens enough
_UNSETTLED = 256  # tokens at the end of a partly read text that the text after it may still change


@dataclass(frozen=True)
class Corpus:
    """Documents before tokenisation: all texts, or all ready token ids (int64 vectors)."""

    source: str
    documents: list[Document]  # (name, text or ids)


@dataclass(frozen=True)
class Stimuli:
    """Token sequences ready for the model, and the documents (clusters) they come from."""

    kind: str  # "text" | "repeated_random_tokens"
    tokens: list[Ids]  # one vector a sequence, no padding
    document: Ids  # [sequences]: index into document_names
    document_names: list[str]  # only documents that gave a sequence
    source: str
    bos: str  # the policy asked for: "auto" | "always" | "never"
    bos_added: bool  # whether every sequence starts with BOS
    token_hash: str  # "sha256:..." over all lengths and ids
    dropped_tokens: int  # tokens read and not used


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
    if max_documents is not None and max_documents < 1:
        raise UserError(f"max_documents must be at least 1, got {max_documents}")
    if isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        documents: Iterable[Document] = _documents(name, text_field, max_documents)
    else:
        name, documents = _in_memory(source)
    found = list(islice((d for d in documents if not isinstance(d[1], str) or d[1].strip()), max_documents))
    if not found:
        raise UserError(f"corpus {name} is empty: it holds no text and no token ids")
    return Corpus(name, found)


# --- Reading ---


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
    _check_range(array, None, where)
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
    return UserError(f"{where}: no text field {field!r}; it has {names}: name the one with the text (text_field)")


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


# --- Cutting into sequences ---


def tokenise(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    context: int,
    sequences: int | None = None,
    bos: str = "auto",
    seed: int = 0,
    vocabulary_size: int | None = None,
) -> Stimuli:
    """Cut the corpus into sequences of exactly `context` tokens, BOS included, none of them across two documents.

    What is left of a document after its last full sequence is dropped and counted, and so is a text shorter than one
    context. Documents that are ready token ids are used at their own length (at least `MIN_TOKENS`) where they are
    shorter than the context and more than one.

    `sequences`: at most so many (fewer where the corpus holds fewer; None: all). They are taken in rounds: the first
    sequence of every document, then the second of every document that has one, and so on, so that as many documents
    as possible are represented; where a round needs only some of the documents, `seed` draws which. Reading stops as
    soon as there are enough: documents not yet come to in the first round are not tokenised, and long ones only as far
    as needed. `dropped_tokens` counts what was read, no more. Sequences come ordered by round, then by document.

    `bos`: "auto" does what the tokenizer does by itself (ready ids stay as they are); "always" starts every sequence
    with BOS (never twice); "never" adds nothing. EOS or anything else that a tokenizer adds at the end is never added.
    Names of special tokens in a text, such as `<|endoftext|>`, are plain text: to have special tokens inside a
    sequence, hand in token ids.

    `vocabulary_size`: the model's; ids at or above it are an error. Where it is not given the tokenizer's own counts.
    UserError too where nothing is left, and for a BOS policy that the tokenizer cannot follow.
    """
    _check_arguments(context, "context", sequences, bos)
    if not corpus.documents:
        raise UserError(f"corpus {corpus.source} is empty")
    ready = not isinstance(corpus.documents[0][1], str)
    if any(isinstance(content, str) == ready for _, content in corpus.documents):
        raise UserError(f"corpus {corpus.source} mixes texts and token ids; use one kind")
    if tokenizer is None and not ready:
        raise UserError(f"the model has no tokenizer to read corpus {corpus.source} with; hand one in, or token ids")

    with _left_as_it_was(tokenizer):
        prefix = _prefix(tokenizer, bos, corpus.documents[0][1])
        room = context - len(prefix)
        documents = [_Document(content, tokenizer, prefix, whole=sequences is None) for _, content in corpus.documents]
        chosen = _in_rounds(documents, room, sequences, seed, own_length=ready and len(documents) > 1)
    names = [name for name, _ in corpus.documents]
    if not chosen:
        longest = max(range(len(documents)), key=lambda i: len(documents[i].ids))
        raise UserError(
            f"text shorter than one context: the longest document, {names[longest]}, has {len(documents[longest].ids)} "
            f"tokens and a sequence needs {room}{' besides BOS' if prefix else ''}; lower --context or use longer texts"
        )
    if vocabulary_size is None and ready and tokenizer is not None:
        vocabulary_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    for i, ids in enumerate(d.ids for d in documents) if ready else chosen:
        _check_range(ids, vocabulary_size, names[i])
    used, document = np.unique([i for i, _ in chosen], return_inverse=True)
    tokens = [np.concatenate([np.asarray(prefix, np.int64), ids]) for _, ids in chosen]
    bos_id = getattr(tokenizer, "bos_token_id", None)
    return Stimuli(
        kind="text",
        tokens=tokens,
        document=document.astype(np.int64),
        document_names=[names[i] for i in used],
        source=corpus.source,
        bos=bos,
        bos_added=bool(prefix) or (bos_id is not None and all(ids[0] == bos_id for ids in tokens)),
        token_hash=token_hash(tokens),
        dropped_tokens=sum(len(d.ids) for d in documents) - sum(len(ids) for _, ids in chosen),
    )


def _in_rounds(
    documents: list[_Document], room: int, sequences: int | None, seed: int, *, own_length: bool
) -> list[tuple[int, Ids]]:
    """At most `sequences` pieces of `room` tokens as (document, ids), ordered by round, then by document.

    `own_length`: documents shorter than `room` are taken as they are.
    """
    chosen: list[tuple[int, int, Ids]] = []  # (round, document, ids)
    active = [int(i) for i in np.random.default_rng(seed).permutation(len(documents))]
    turn = 0
    while active and (sequences is None or len(chosen) < sequences):
        going_on = []
        for i in active:
            if len(chosen) == sequences:
                break
            ids = documents[i].tokens((turn + 1) * room)[turn * room : (turn + 1) * room]
            if len(ids) == room:
                going_on.append(i)
            elif not (own_length and turn == 0 and len(ids) >= MIN_TOKENS):
                continue
            chosen.append((turn, i, ids))
        active, turn = going_on, turn + 1
    chosen.sort(key=lambda entry: entry[:2])
    return [(i, ids) for _, i, ids in chosen]


class _Document:
    """One document's token ids, encoded from its beginning as far as they have been asked for."""

    def __init__(self, content: str | Ids, tokenizer: Any, prefix: list[int], *, whole: bool) -> None:
        self.text, self.tokenizer = content if isinstance(content, str) else "", tokenizer
        self.ids = np.empty(0, np.int64)
        if not isinstance(content, str):  # "always" never makes two BOS of one
            self.ids = content[1:] if prefix and len(content) and content[0] == prefix[0] else content
        self.read = 0
        self.step = len(self.text) if whole else _FIRST_READ

    def tokens(self, wanted: int) -> Ids:
        """At least `wanted` ids from the beginning, or all there are."""
        while len(self.ids) < wanted and self.read < len(self.text):
            self.read = max(self.step, 2 * self.read)
            ids = _encode(self.tokenizer, self.text[: self.read])
            # Tokens near a cut may come out differently when more text follows, so they wait for it.
            self.ids = np.asarray(ids if self.read >= len(self.text) else ids[:-_UNSETTLED], np.int64)
        return self.ids


def _encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Ids of `text` as plain text; `special`: with what the tokenizer adds around a text by itself."""
    try:
        encoded = tokenizer(text, add_special_tokens=special, split_special_tokens=True, verbose=False)
    except (TypeError, ValueError):  # tokenizers that never read special tokens out of a text refuse the option
        encoded = tokenizer(text, add_special_tokens=special, verbose=False)
    return list(encoded["input_ids"])


def _prefix(tokenizer: Any, bos: str, sample: str | Ids) -> list[int]:
    """The ids that every sequence starts with under the policy `bos`."""
    if bos == "never" or (bos == "auto" and not isinstance(sample, str)):
        return []
    own = _added_in_front(tokenizer, sample if isinstance(sample, str) else "") if tokenizer is not None else []
    if bos == "auto":
        return own
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None:
        raise UserError("--bos always needs a tokenizer with a BOS token, and this one has none; use auto or never")
    return own if bos_id in own else [int(bos_id)]


def _added_in_front(tokenizer: Any, sample: str) -> list[int]:
    """What the tokenizer puts in front of a text by itself, found by trying: attributes that should say so differ.

    A text serves as a probe if some of its ids are not special, so that they cannot be confused with what is added.
    """
    special = set(tokenizer.all_special_ids)
    for probe in (sample[:200], "a", "The", "0"):
        plain = _encode(tokenizer, probe) if probe else []
        if special.issuperset(plain):
            continue
        full = _encode(tokenizer, probe, special=True)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
    return []


@contextmanager
def _left_as_it_was(tokenizer: Any) -> Iterator[None]:
    """Restores what calling a fast tokenizer changes in its backend: truncation, padding, reading of special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        yield
        return
    special, truncation, padding = backend.encode_special_tokens, backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.encode_special_tokens = special
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def token_hash(tokens: list[Ids]) -> str:
    """ "sha256:..." over the number of sequences, their lengths and all ids, each as a little-endian int64."""
    digest = hashlib.sha256(np.array([len(tokens), *map(len, tokens)], "<i8").tobytes())
    for ids in tokens:
        digest.update(ids.astype("<i8").tobytes())
    return f"sha256:{digest.hexdigest()}"


def _check_arguments(length: int, name: str, sequences: int | None, bos: str) -> None:
    if length < MIN_TOKENS:
        raise UserError(f"{name} must be at least {MIN_TOKENS} tokens, got {length}")
    if sequences is not None and sequences < 1:
        raise UserError(f"sequences must be at least 1, got {sequences}")
    if bos not in BOS_POLICIES:
        raise UserError(f"bos must be one of {', '.join(BOS_POLICIES)}, got {bos!r}")


def _check_range(ids: npt.NDArray[Any], size: int | None, where: str) -> None:
    wrong = np.flatnonzero((ids < 0) | (ids >= (np.iinfo(np.int64).max if size is None else size)))
    if wrong.size:
        vocabulary = "token ids start at 0" if size is None else f"the vocabulary's are 0 to {size - 1}"
        raise UserError(f"{where}: token id {ids[wrong[0]]} at position {wrong[0]} is out of range ({vocabulary})")


# --- Repeated random tokens ---


def ordinary_token_ids(tokenizer_or_vocabulary_size: PreTrainedTokenizerBase | int) -> Ids:
    """Ids of the vocabulary, sorted, without special and added tokens; all ids below a size given as a number."""
    if isinstance(tokenizer_or_vocabulary_size, int | np.integer):
        return np.arange(tokenizer_or_vocabulary_size, dtype=np.int64)
    tokenizer = tokenizer_or_vocabulary_size
    left_out = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return np.array(sorted(set(tokenizer.get_vocab().values()) - left_out), np.int64)


def repeated_random_tokens(
    tokenizer_or_vocabulary_size: PreTrainedTokenizerBase | int,
    *,
    length: int,
    sequences: int = 16,
    bos: str = "auto",
    seed: int = 0,
) -> Stimuli:
    """Sequences `[BOS?] x x` of `length` tokens in all, `x` random: the stimuli that tell kinds of heads apart.

    `x` is drawn without replacement from `ordinary_token_ids`, so that a token's one earlier occurrence is known. Where
    two copies do not divide the length, the second lacks its last token. Each sequence is a document (cluster) of its
    own. A vocabulary size in place of a tokenizer knows no BOS. UserError where the vocabulary is too small.
    """
    _check_arguments(length, "length", sequences, bos)
    tokenizer = None if isinstance(tokenizer_or_vocabulary_size, int | np.integer) else tokenizer_or_vocabulary_size
    ordinary = ordinary_token_ids(tokenizer_or_vocabulary_size)
    with _left_as_it_was(tokenizer):
        prefix = np.array(_prefix(tokenizer, bos, ""), np.int64)
    period = -(-(length - len(prefix)) // 2)
    if period > len(ordinary):
        raise UserError(
            f"{length} repeated random tokens need {period} different ones and the vocabulary has {len(ordinary)}; "
            f"lower the length to {2 * len(ordinary) + len(prefix)}"
        )
    rng = np.random.default_rng(seed)
    tokens = []
    for _ in range(sequences):
        x = rng.choice(ordinary, period, replace=False)
        tokens.append(np.concatenate([prefix, x, x])[:length])
    return Stimuli(
        kind="repeated_random_tokens",
        tokens=tokens,
        document=np.arange(sequences, dtype=np.int64),
        document_names=[f"random[{i}]" for i in range(sequences)],
        source="repeated random tokens",
        bos=bos,
        bos_added=bool(len(prefix)),
        token_hash=token_hash(tokens),
        dropped_tokens=0,
    )
