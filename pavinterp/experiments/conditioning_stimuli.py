"""Stimuli of conditioning: single tokens of a model's vocabulary, matched in frequency and norm, drawn for a paradigm.

A stimulus is one token that stays one token, and the same, wherever a layout puts it. Stimuli of a draw differ in their
first letters (no stem, no case variant twice) and lie in one narrow window of unigram logit and embedding norm, so that
nothing but the schedule sets them apart; which of them plays which part is random.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pavinterp.errors import UserError
from pavinterp.experiments.interventions import logits
from pavinterp.experiments.trial_layouts import TEXTS, Layout
from pavinterp.models import ModelHandle
from pavinterp.stimuli import Stimuli, _encode, _left_as_it_was, ordinary_token_ids
from pavinterp.theory.schedules import Paradigm

KINDS = ("words", "random", "nonsense")
WINDOWS = ((1.0, 1.1), (1.5, 1.1), (2.0, 1.2), (3.0, 1.2), (4.0, 1.3), (6.0, 1.5), (8.0, 2.0))
"""Widest difference of unigram logits (nats) and ratio of norms within a draw; the first that holds enough stimuli."""

PREFIX = 3  # letters in which any two stimuli of a draw differ
MOST = 6000  # candidates that are looked at
FILLERS = 16
FULL_COSINE = 0.8  # a paradigm's cosine from which on a neighbour is the nearest there is


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that can be stimuli.

    Attributes:
        ids: of the tokens.
        texts: each token's text, within a line.
        unigram: logarithm of the model's next-token probability, mean over the positions of a text.
        norms: of their input embeddings.
        directions: embeddings about their mean, of length 1.
        matched: whether draws keep to a window of unigram logit and norm; not where the user chose the tokens.
        what: said in messages: "words", "the tokens of FILE".
    """

    ids: npt.NDArray[np.int64]
    texts: tuple[str, ...]
    unigram: npt.NDArray[np.float64]
    norms: npt.NDArray[np.float64]
    directions: npt.NDArray[np.float64]
    matched: bool = True
    what: str = "tokens"

    def prefix(self, place: int) -> str:
        """What no two stimuli of a draw share: the first letters, in small letters; the text where it is shorter."""
        return self.texts[place].strip().casefold()[:PREFIX] or self.texts[place]


@dataclass(frozen=True)
class Pool:
    """The tokens of a vocabulary that draws are made from.

    Attributes:
        places: of the tokens in the vocabulary.
        logit_window: largest difference of their unigram logits, nats.
        norm_window: largest ratio of their norms.
    """

    places: npt.NDArray[np.int64]
    logit_window: float
    norm_window: float


@dataclass(frozen=True)
class Draw:
    """Stimuli of one draw.

    Attributes:
        tokens: id of each stimulus of the paradigm.
        foils: ids of control USs, which are presented nowhere.
        filler: ids of what is neither.
        cosines: of stimuli that are to be alike, by their names: that of their embeddings about the mean.
    """

    tokens: dict[str, int]
    foils: npt.NDArray[np.int64]
    filler: npt.NDArray[np.int64]
    cosines: dict[tuple[str, str], float]


def needed(paradigm: Paradigm, foils: int) -> int:
    """Different tokens that a draw takes beside filler."""
    return len(paradigm.css) + len(paradigm.uss) + foils


def pool(vocabulary: Vocabulary, wanted: int) -> Pool:
    """The tightest window of `WINDOWS` with enough tokens in it: half as many again as wanted, and filler.

    A window lies where it holds most tokens of different prefixes.

    Raises:
        UserError: the widest holds too few.
    """
    enough = max(wanted + FILLERS, wanted * 3 // 2)
    prefixes = np.unique([vocabulary.prefix(i) for i in range(len(vocabulary.ids))], return_inverse=True)[1]
    if not vocabulary.matched:
        found = np.arange(len(vocabulary.ids))
        there = len(np.unique(prefixes))
        enough = wanted
        if there >= enough:
            return _window_of(vocabulary, found)
        raise UserError(_too_few(vocabulary, enough, there))
    there = 0
    logs = np.log(vocabulary.norms)
    for width, ratio in WINDOWS:
        best: npt.NDArray[np.int64] = np.empty(0, np.int64)
        there = 0
        for low in np.unique(vocabulary.unigram):
            inside = np.flatnonzero((vocabulary.unigram >= low) & (vocabulary.unigram <= low + width))
            inside = inside[abs(logs[inside] - np.median(logs[inside])) <= np.log(ratio) / 2]
            if len(inside) > there and (distinct := len(np.unique(prefixes[inside]))) > there:
                best, there = inside, distinct
        if there >= enough:
            return _window_of(vocabulary, best)
    raise UserError(_too_few(vocabulary, enough, there))


def _window_of(vocabulary: Vocabulary, places: npt.NDArray[np.int64]) -> Pool:
    logit, norm = vocabulary.unigram[places], vocabulary.norms[places]
    return Pool(places, float(np.ptp(logit)), float(norm.max() / norm.min()))


def _too_few(vocabulary: Vocabulary, wanted: int, there: int) -> str:
    return (
        f"{wanted} different stimuli are needed and {there} of {vocabulary.what} are alike enough in frequency and "
        "norm and begin differently: take other --stimuli (random, a file), or fewer --paradigms (capacity needs most)"
        if vocabulary.matched
        else f"{wanted} different stimuli are needed and {vocabulary.what} that begin differently are {there}: add more"
    )


def draw(vocabulary: Vocabulary, chosen: Pool, paradigm: Paradigm, foils: int, seed: int, number: int) -> Draw:
    """Stimuli of one draw: a function of the paradigm, the seed and the draw's number alone.

    A stimulus that is to be like another one (`similar`) is a neighbour of that one's embedding: at a cosine written as
    0.8 the nearest in the pool, at a smaller one the token whose cosine is nearest to as large a share of that.
    """
    rng = np.random.default_rng([seed, zlib.crc32(paradigm.name.encode()), number])
    left = [int(i) for i in rng.permutation(chosen.places)]
    taken: set[str] = set()
    tokens: dict[str, int] = {}
    at: dict[str, int] = {}

    def take(places: Iterable[int]) -> int:
        for place in places:
            if (prefix := vocabulary.prefix(place)) not in taken:
                taken.add(prefix)
                left.remove(place)
                return place
        raise UserError(_too_few(vocabulary, needed(paradigm, foils), len(taken)))

    cosines: dict[tuple[str, str], float] = {}
    alike = {one: (two, cosine) for one, two, cosine in paradigm.similar}
    anchors = [two for two, _ in alike.values() if two not in alike]
    for name in dict.fromkeys(anchors):
        at[name] = take(list(left))
    for name, (like, wanted) in sorted(alike.items(), key=lambda item: -item[1][1]):
        if like not in at:  # itself like another one that has no place yet
            at[like] = take(list(left))
        free = np.array([i for i in left if vocabulary.prefix(i) not in taken])
        if not len(free):
            raise UserError(_too_few(vocabulary, needed(paradigm, foils), len(taken)))
        near = vocabulary.directions[free] @ vocabulary.directions[at[like]]
        goal = min(wanted / FULL_COSINE, 1.0) * near.max()
        best = int(np.argmin(abs(near - goal)))
        at[name] = take([int(free[best])])
        cosines[name, like] = float(near[best])
    for name in (*paradigm.css, *paradigm.uss):
        if name not in at:
            at[name] = take(list(left))
    tokens = {name: int(vocabulary.ids[place]) for name, place in at.items()}
    controls = [take(list(left)) for _ in range(foils)]
    rest = [i for i in left if vocabulary.prefix(i) not in taken][: 4 * FILLERS]
    return Draw(tokens, vocabulary.ids[controls], vocabulary.ids[rest], cosines)


def vocabulary_of(
    handle: ModelHandle, kind: str | Path, layouts: Sequence[str], text: Stimuli, seed: int = 0
) -> tuple[Vocabulary, list[Layout]]:
    """Tokens that can be stimuli, and the layouts in the tokens of this model.

    Args:
        handle: the model; `untouched` is the caller's to hold.
        kind: `words` (tokens of a space and at least three letters, small ones, of which none begins another),
            `nonsense` (of a space and letters without a vowel), `random` (any), or a file with one stimulus a line.
        layouts: names in `TEXTS`.
        text: over which unigram logits are averaged.
        seed: of the choice of candidates, where there are more than 6,000.

    Raises:
        UserError: no tokenizer; a file that cannot be read; no tokens of this kind.
    """
    tokenizer: Any = handle.tokenizer
    if tokenizer is None:
        raise UserError(f"{handle.name} has no tokenizer to make stimuli with: name one with --tokenizer")
    with _left_as_it_was(tokenizer):
        what, ids, texts = _candidates(handle, kind)
        if len(ids) > MOST:
            some = np.sort(np.random.default_rng(seed).choice(len(ids), MOST, replace=False))
            ids, texts = ids[some], [texts[i] for i in some]
        found, kept = [], np.arange(len(ids))
        for name in layouts:
            layout, survive = _layout(tokenizer, name, ids[kept], [texts[i] for i in kept])
            found.append(layout)
            kept = kept[survive]
    marks = {token for layout in found for token in (*layout.between, *layout.after)}
    kept = np.array([i for i in kept if ids[i] not in marks], np.int64)
    if not len(kept):
        raise UserError(f"none of {what} stays one token in the layouts {', '.join(layouts)}: take other --stimuli")
    embedding: Any = handle.model.get_input_embeddings()
    rows = embedding.weight.detach()[torch.from_numpy(ids[kept]).to(embedding.weight.device)].double().cpu().numpy()
    norms = np.linalg.norm(rows, axis=1)
    kept, rows, norms = kept[norms > 0], rows[norms > 0], norms[norms > 0]
    about = rows - rows.mean(0)
    size = np.linalg.norm(about, axis=1, keepdims=True)
    return Vocabulary(
        ids=ids[kept],
        texts=tuple(texts[i] for i in kept),
        unigram=unigram_logits(handle, text)[ids[kept]],
        norms=norms,
        directions=about / np.where(size > 0, size, 1),
        matched=kind in KINDS,
        what=what,
    ), found


def unigram_logits(handle: ModelHandle, text: Stimuli) -> npt.NDArray[np.float64]:
    """Logarithm of the model's next-token distribution averaged over all positions of a text, [vocabulary]."""
    total, positions = None, 0
    for tokens in text.tokens:
        rows = logits(handle, torch.from_numpy(tokens)[None].to(handle.device))[0]
        mass = rows.float().softmax(-1).double().sum(0)
        total = mass if total is None else total + mass
        positions += len(tokens)
    assert total is not None
    return (total / positions).clamp_min(1e-300).log().cpu().numpy()


def _candidates(handle: ModelHandle, kind: str | Path) -> tuple[str, npt.NDArray[np.int64], list[str]]:
    """What they are called, ids and texts of tokens of this kind, whether they survive or not."""
    tokenizer: Any = handle.tokenizer
    if kind not in KINDS:
        return _listed(tokenizer, Path(kind), handle.vocabulary_size)
    ids = ordinary_token_ids(tokenizer, handle.vocabulary_size)
    texts = [_text(tokenizer, int(i)) for i in ids]
    fits: Callable[[str], object] = {
        "words": lambda text: re.fullmatch(r" [^\W\d_]{3,}", text) and text == text.lower(),
        "nonsense": lambda text: re.fullmatch(r" [^\W\d_]{2,}", text) and not re.search("[aeiouy]", text.lower()),
        "random": lambda text: text.strip() and "\ufffd" not in text,
    }[str(kind)]
    chosen = [i for i, text in enumerate(texts) if fits(text)]
    if kind == "words":
        ordered = sorted(chosen, key=lambda i: texts[i])
        begins = {a for a, b in itertools.pairwise(ordered) if texts[b].startswith(texts[a])}
        chosen = [i for i in chosen if i not in begins]
    return (
        {"words": "the words", "nonsense": "the nonsense words", "random": "the tokens"}[str(kind)],
        ids[chosen],
        [texts[i] for i in chosen],
    )


def _text(tokenizer: Any, token: int) -> str:
    """A token's text where another one comes before it: some tokenizers drop the space at the beginning of a text."""
    one, two = (tokenizer.decode([token] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
    return two[len(one) :]


def _listed(tokenizer: Any, file: Path, size: int) -> tuple[str, npt.NDArray[np.int64], list[str]]:
    """A user's stimuli, one a line; those that are not one token, with a space in front or without, are left out."""
    try:
        lines = [line.strip() for line in file.expanduser().read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--stimuli {file!s:.60}: {' '.join(str(error).split()):.100}: give {', '.join(KINDS)}, or a text file "
            "with one stimulus a line"
        ) from error
    found: dict[int, str] = {}
    for line in dict.fromkeys(filter(None, lines)):
        for text in (f" {line}", line):
            ids = _encode(tokenizer, f"a{text}")[len(_encode(tokenizer, "a")) :]
            if len(ids) == 1 and ids[0] < size:
                found[int(ids[0])] = text
                break
    return f"the stimuli of {file.name}", np.array(list(found), np.int64), list(found.values())


def _layout(
    tokenizer: Any, name: str, ids: npt.NDArray[np.int64], texts: Sequence[str]
) -> tuple[Layout, npt.NDArray[np.int64]]:
    """The layout in token ids, and the places of the tokens that survive in it.

    Each token is written as CS and US of three trials; what stands between and after is what most tokens leave there.
    """
    if name not in TEXTS:
        raise UserError(f"layout {name!r:.40}: choose among {', '.join(TEXTS)}")
    between, after = TEXTS[name]
    left = [
        _between(_encode(tokenizer, (text + between + text + after) * 3), int(i))
        for i, text in zip(ids, texts, strict=True)
    ]
    counts = Counter(marks for marks in left if marks is not None)
    if not counts:
        return Layout(name, (), ()), np.empty(0, np.int64)
    usual = counts.most_common(1)[0][0]
    return Layout(name, *usual), np.array([i for i, marks in enumerate(left) if marks == usual], np.int64)


def _between(ids: Sequence[int], token: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What stands between CS and US and after the US, where the last two trials are of this token; None where not."""
    at = [i for i, found in enumerate(ids) if found == token]
    if len(at) not in (5, 6):  # the first may be another token where nothing comes before it
        return None
    cs, us, cs2, us2 = at[-4:]
    one, two = ((tuple(ids[a + 1 : b]), tuple(ids[b + 1 : c])) for a, b, c in ((cs, us, cs2), (cs2, us2, len(ids))))
    return one if one == two else None
