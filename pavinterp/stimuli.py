"""Stimuli: the token sequences that a model is shown, cut from a corpus or drawn as repeated random tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pavinterp.arguments import require_one_of, require_whole
from pavinterp.corpora import Corpus, Ids, check_range
from pavinterp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS_POLICIES = ("auto", "always", "never")
MIN_TOKENS = 8  # a sequence shorter than this says nothing about how load grows with context
_FIRST_READ = 2**16  # characters of a document encoded at first; doubled until there are tokens enough
_UNSETTLED = 256  # tokens at the end of a partly read text that the text after it may still change


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
    words: tuple[str, ...] | None = None  # of the command line that reads this corpus; None where none can
    short_documents: int = 0  # documents read that are shorter than one sequence and gave none


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
    context (`short_documents`: how many of those were read). Documents that are ready token ids are used at their own
    length (at least `MIN_TOKENS`) where they are shorter than the context and more than one.

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
    _check_arguments(context, "context", sequences, bos, seed)
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
        chosen, short = _in_rounds(documents, room, sequences, seed, own_length=ready and len(documents) > 1)
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
        check_range(ids, vocabulary_size, names[i])
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
        words=corpus.words,
        short_documents=short,
    )


def _in_rounds(
    documents: list[_Document], room: int, sequences: int | None, seed: int, *, own_length: bool
) -> tuple[list[tuple[int, Ids]], int]:
    """At most `sequences` pieces of `room` tokens as (document, ids), ordered by round, then by document.

    `own_length`: documents shorter than `room` are taken as they are. Second, how many documents were too short.
    """
    chosen: list[tuple[int, int, Ids]] = []  # (round, document, ids)
    short = 0
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
                short += turn == 0
                continue
            chosen.append((turn, i, ids))
        active, turn = going_on, turn + 1
    chosen.sort(key=lambda entry: entry[:2])
    return [(i, ids) for _, i, ids in chosen], short


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


def check_stimuli(stimuli: Stimuli, vocabulary_size: int, positions: int | None) -> None:
    """UserError unless a model of so many tokens and positions (None: any number) can read the sequences as text."""
    if stimuli.kind != "text":
        raise UserError(
            f"the text is {stimuli.source}; every run measures those beside the text: give a text, or, to take them "
            "for one, their ids: corpus([ids.tolist() for ids in stimuli.tokens])"
        )
    if not stimuli.tokens or len(stimuli.document) != len(stimuli.tokens):
        raise UserError(
            f"stimuli of {len(stimuli.tokens)} sequences with {len(stimuli.document)} document indices: make them with "
            "tokenise()"
        )
    for i, ids in enumerate(stimuli.tokens):
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UserError(f"sequence {i} of the stimuli is no vector of whole numbers: make them with tokenise()")
        check_range(ids, vocabulary_size, f"sequence {i} of the stimuli")
        if len(ids) < MIN_TOKENS or (positions is not None and len(ids) > positions):
            most = "" if positions is None else f" and has {positions} positions"
            raise UserError(
                f"sequence {i} of the stimuli has {len(ids)} tokens; the model needs at least {MIN_TOKENS}{most}"
            )


def _check_arguments(length: int, name: str, sequences: int | None, bos: str, seed: int) -> None:
    require_whole(name, length, MIN_TOKENS)
    if sequences is not None:
        require_whole("sequences", sequences, 1)
    require_one_of("bos", bos, BOS_POLICIES)
    require_whole("seed", seed, 0)


def ordinary_token_ids(tokenizer_or_vocabulary_size: PreTrainedTokenizerBase | int, below: int | None = None) -> Ids:
    """Ids of the vocabulary, sorted, without special and added tokens; all ids below a size given as a number.

    `below`: rows of the model's embedding; a tokenizer may know tokens that the model has no row for.
    """
    if isinstance(tokenizer_or_vocabulary_size, int | np.integer):
        return np.arange(tokenizer_or_vocabulary_size, dtype=np.int64)
    tokenizer = tokenizer_or_vocabulary_size
    left_out = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    ids = np.array(sorted(set(tokenizer.get_vocab().values()) - left_out), np.int64)
    return ids if below is None else ids[ids < below]


def repeated_random_tokens(
    tokenizer_or_vocabulary_size: PreTrainedTokenizerBase | int,
    *,
    length: int,
    sequences: int = 16,
    bos: str = "auto",
    seed: int = 0,
    below: int | None = None,
) -> Stimuli:
    """Sequences `[BOS?] x x` of `length` tokens in all, `x` random: the stimuli that tell kinds of heads apart.

    `x` is drawn without replacement from `ordinary_token_ids`, so that a token's one earlier occurrence is known. Where
    two copies do not divide the length, the second lacks its last token. Each sequence is a document (cluster) of its
    own. A vocabulary size in place of a tokenizer knows no BOS. Ids from `below` on, if given, are left out. UserError
    where the vocabulary is too small.
    """
    _check_arguments(length, "length", sequences, bos, seed)
    tokenizer = None if isinstance(tokenizer_or_vocabulary_size, int | np.integer) else tokenizer_or_vocabulary_size
    ordinary = ordinary_token_ids(tokenizer_or_vocabulary_size, below)
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
