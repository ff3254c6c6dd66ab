"""Reading: what a measurement and every experiment begin with, from model and corpus to text and certified records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from pavinterp.arguments import require_one_of, require_whole, whole_numbers
from pavinterp.capture.paths import on_path
from pavinterp.certified import certified
from pavinterp.corpora import Corpus
from pavinterp.corpora import corpus as read_corpus
from pavinterp.errors import UserError
from pavinterp.manifest import work
from pavinterp.models import ModelHandle, load, untouched
from pavinterp.pieces import Pieces, kept_pieces
from pavinterp.progress import progress_to
from pavinterp.stimuli import BOS_POLICIES, MIN_TOKENS, Stimuli, check_stimuli, tokenise
from pavinterp.sweep import LayerInfo, inspect, merge, require_known

CONTEXT = 256  # tokens a sequence where an experiment is not told

Progress = Callable[[str, int, int], None]  # stage, sequences done, sequences in all


@dataclass(frozen=True)
class Reading:
    """A model and the text that an experiment reads with it.

    Attributes:
        handle: the model, as it is captured.
        shapes: its attention layers.
        layers: those that the experiment is about; None is all.
        text: what is read.
        stage: called with a stage, done and total.
    """

    handle: ModelHandle
    shapes: list[LayerInfo]
    layers: set[int] | None
    text: Stimuli
    stage: Progress

    @property
    def chosen(self) -> list[LayerInfo]:
        """The layers that the experiment is about."""
        return shapes_of(self.shapes, self.layers)

    def work(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """All that the numbers of this work depend on.

        Args:
            what: the experiment.
            arguments: all that its numbers depend on beside model and text.

        Raises:
            UserError: there are hooks on the model: nothing tells whether they are those of another process.
        """
        return work(self.handle, self.shapes, self.text, what, arguments)

    def pieces(
        self, what: str, arguments: dict[str, Any], resume: bool, parts: Path | None = None, *, stay: bool = False
    ) -> AbstractContextManager[Pieces]:
        """Finished parts of this work: of other processes (interrupted ones, or shards), and to be kept by this one.

        Args:
            what, arguments: as for `work`.
            resume: False keeps and reads nothing.
            parts, stay: as for `kept_pieces`.

        Raises:
            UserError: as for `work`.
        """
        return kept_pieces(self.work(what, arguments) if resume else None, parts, stay=stay)

    def arguments(self, **own: Any) -> dict[str, Any]:
        """Arguments as they took effect, for the manifest: what was read, then the experiment's own."""
        return {
            "context": max(len(tokens) for tokens in self.text.tokens),
            "sequences": len(self.text.tokens),
            "layers": "all" if self.layers is None else sorted(self.layers),
            **own,
        }


@contextmanager
def reading(
    model: ModelHandle | str | Any,
    corpus: Any,
    *,
    context: int | None,
    sequences: int | None,
    usual_sequences: int,
    usual_context: int = CONTEXT,
    layers: Iterable[int] | None,
    seed: int,
    bos: str,
    capture: str,
    progress: Progress | Literal[False] | None,
) -> Iterator[Reading]:
    """Inside, the model is the experiment's alone, and left as it was.

    Args:
        model, corpus, layers, seed, bos, capture, progress: as the experiment was given them, and has checked them.
        context: tokens a sequence; None is `usual_context`, or the model's positions if fewer.
        sequences: how many; None is `usual_sequences`, or as many as the text has.
        usual_sequences, usual_context: of this experiment.

    Raises:
        UserError: the model or text cannot be measured.
    """
    handle = on_path(model if isinstance(model, ModelHandle) else load(model), capture)
    shown = nullcontext(progress) if callable(progress) else progress_to(quiet=progress is False)
    with shown as stage, untouched(handle.model):
        shapes = inspect(handle)
        chosen = choose_layers(shapes, None if layers is None else list(layers))
        require_known(handle, {info.layer: info.between for info in shapes_of(shapes, chosen)})
        if isinstance(corpus, Stimuli):
            text = _ready(handle, corpus, context, sequences)
        else:
            wanted = usual_sequences if sequences is None else sequences
            text = _cut(handle, corpus, context, usual_context, wanted, bos, seed)
        yield Reading(handle, shapes, chosen, text, stage)


def certified_records(
    handle: ModelHandle,
    text: Stimuli,
    measures: Sequence[Any],
    *,
    layers: set[int] | None,
    tests: int | None,
    batch: int | None,
    seed: int,
    dtype: torch.dtype = torch.float32,
    stage: Progress | None = None,
    what: str = "",
    pieces: Pieces | None = None,
) -> tuple[pd.DataFrame, dict[int, list[float]]]:
    """Records of every sequence and head, and by layer the largest certificate residual of each head.

    Args:
        handle, text, measures, layers, tests, seed, dtype: as for `sweep`.
        batch: as for `certified`.
        stage: called with `what`, sequences done and in all; None says nothing.
        what: the stage's name.
        pieces: where records of finished batches are kept; None keeps nothing.

    Raises:
        UserError: the certificate fails, or something that is not a gate changes a layer's responses.
    """
    frames, residuals, done = [], dict[int, list[float]](), 0
    if stage is not None:
        stage(what, 0, len(text.tokens))
    for part in certified(
        handle,
        text,
        measures,
        tests=tests,
        layers=layers,
        batch=batch,
        seed=seed,
        dtype=dtype,
        pieces=pieces,
        name=what,
    ):
        merge(residuals, part.residuals)
        frames.append(part.records)
        done += len(part.sequences)
        if stage is not None:
            stage(what, done, len(text.tokens))
    return pd.concat(frames, ignore_index=True), residuals


def check_arguments(
    tests: Any, layers: Any, seed: Any, batch: Any, bos: Any, progress: Any
) -> tuple[list[int] | None, int]:
    """The layers and the seed as plain numbers, whatever kind of numbers they were given as.

    Raises:
        UserError: an argument that `measure` and the experiments share is none that they take.
    """
    if tests is not None:
        require_whole("tests", tests, 1, " or None (every position)")
    if batch is not None:
        require_whole("batch", batch, 1)
    require_whole("seed", seed, 0)
    require_one_of("bos", bos, BOS_POLICIES)
    if not (progress is None or progress is False or callable(progress)):
        raise UserError(f"progress must be a function of (stage, done, total), None or False, got {progress!r:.40}")
    return whole_numbers("layers", layers, 0), int(seed)


def choose_layers(shapes: list[LayerInfo], layers: list[int] | None) -> set[int] | None:
    """Layers to capture; None is all. UserError where one has no attention."""
    if layers is None:
        return None
    known = {info.layer for info in shapes}
    wrong = sorted(set(layers) - known)
    if wrong or not layers:
        raise UserError(f"layers {wrong or layers}: choose among the attention layers {min(known)} to {max(known)}")
    return set(layers)


def shapes_of(shapes: list[LayerInfo], layers: set[int] | None) -> list[LayerInfo]:
    """Those of the layers that `choose_layers` gave."""
    return [info for info in shapes if layers is None or info.layer in layers]


def _ready(handle: ModelHandle, text: Stimuli, context: int | None, sequences: int | None) -> Stimuli:
    """Stimuli that the caller has made, if the model can read them."""
    if context is not None or sequences is not None:
        raise UserError("context= and sequences= with ready Stimuli: those are cut already; leave both out")
    check_stimuli(text, handle.vocabulary_size, handle.max_context)
    return text


def _cut(
    handle: ModelHandle, corpus: Any, context: int | None, usual: int, sequences: int, bos: str, seed: int
) -> Stimuli:
    """The corpus cut into sequences of `context` tokens, or as many as usual and as the model has positions for."""
    documents = corpus if isinstance(corpus, Corpus) else read_corpus(corpus)
    limit = handle.max_context
    if limit is not None and limit < MIN_TOKENS:
        raise UserError(f"{handle.name} has {limit} positions; a sequence needs at least {MIN_TOKENS}")
    if context is None:
        context = min(usual, limit or usual)
    require_whole("context", context, MIN_TOKENS)
    if limit is not None and context > limit:
        raise UserError(
            f"context {context} is beyond the {limit} positions of {handle.name}; use --context {limit} or less"
        )
    return tokenise(
        documents,
        handle.tokenizer,
        context=context,
        sequences=sequences,
        bos=bos,
        seed=seed,
        vocabulary_size=handle.vocabulary_size,
    )


def vocabulary_of(handle: ModelHandle) -> Any:
    """What random tokens are drawn from: the tokenizer, or the number of tokens where there is none."""
    return handle.tokenizer or handle.vocabulary_size
