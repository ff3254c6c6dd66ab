"""Reading: what every experiment begins with, from model and corpus to text and certified records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch

from pavinterp.capture.paths import on_path
from pavinterp.certified import certified, merge
from pavinterp.manifest import work
from pavinterp.models import ModelHandle, load, untouched
from pavinterp.pieces import Pieces, kept_pieces
from pavinterp.progress import progress_to
from pavinterp.run import Progress, choose_layers, shapes_of, stimuli_for
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import LayerInfo, inspect, require_known

CONTEXT = 256  # tokens a sequence where an experiment is not told


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

    def pieces(self, experiment: str, arguments: dict[str, Any], resume: bool) -> AbstractContextManager[Pieces]:
        """Finished parts of this experiment: of an earlier process that was interrupted, and to be kept by this one.

        Raises:
            UserError: there are hooks on the model: nothing tells whether they are those of the interrupted process.
        """
        return kept_pieces(work(self.handle, self.shapes, self.text, experiment, arguments) if resume else None)

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
    layers: Iterable[int] | None,
    seed: int,
    bos: str,
    capture: str,
    progress: Progress | Literal[False] | None,
) -> Iterator[Reading]:
    """Inside, the model is the experiment's alone, and left as it was.

    Args:
        model, corpus, layers, seed, bos, capture, progress: as the experiment was given them, and has checked them.
        context: tokens a sequence; None is 256, or the model's positions if fewer.
        sequences: how many; None is `usual_sequences`, or as many as the text has.
        usual_sequences: of this experiment.

    Raises:
        UserError: the model or text cannot be measured.
    """
    handle = on_path(model if isinstance(model, ModelHandle) else load(model), capture)
    shown = nullcontext(progress) if callable(progress) else progress_to(quiet=progress is False)
    with shown as stage, untouched(handle.model):
        shapes = inspect(handle)
        chosen = choose_layers(shapes, None if layers is None else list(layers))
        require_known(handle, {info.layer: info.between for info in shapes_of(shapes, chosen)})
        if not isinstance(corpus, Stimuli):
            context = min(CONTEXT, handle.max_context or CONTEXT) if context is None else context
            sequences = usual_sequences if sequences is None else sequences
        yield Reading(handle, shapes, chosen, stimuli_for(handle, corpus, context, sequences, bos, seed), stage)


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
