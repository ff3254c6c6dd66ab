"""measure(): one run from model and text to records; measure_shard(): a share of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pavinterp import store
from pavinterp.arguments import require_whole, require_yes_or_no
from pavinterp.capture import certificate
from pavinterp.certified import certified
from pavinterp.corpora import Corpus
from pavinterp.errors import UserError
from pavinterp.examples import examples as find_examples
from pavinterp.manifest import describe_run
from pavinterp.measures import all_measures
from pavinterp.models import ModelHandle
from pavinterp.norms import find_norms
from pavinterp.pieces import Pieces, digest
from pavinterp.reading import Progress, Reading, check_arguments, reading, shapes_of, vocabulary_of
from pavinterp.run import Run
from pavinterp.stimuli import (
    MIN_TOKENS,
    Stimuli,
    ordinary_token_ids,
    repeated_random_tokens,
)
from pavinterp.sweep import Batch, merge

CONTEXT, SEQUENCES = 1024, 64  # where not told
PROBE_SEQUENCES = 16  # of repeated random tokens
PROBE_LENGTH = 257  # longest probe: BOS and two times 128 tokens
KEPT_SEQUENCES = 8  # whose single tests the head pages show


def measure(
    model: ModelHandle | str | Any = "demo",
    corpus: Corpus | Stimuli | str | Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    tests: int | None = 64,
    layers: list[int] | None = None,
    seed: int = 0,
    batch: int | None = None,
    bos: str = "auto",
    capture: str = "auto",
    examples: bool = True,
    resume: bool = False,
    parts: str | Path | None = None,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Run:
    """Measure every attention head of a model on a text.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: a corpus from `corpus`, anything that takes, or ready Stimuli.
        context: tokens a sequence; default 1,024 or the model's positions, whichever is less.
        sequences: how many; default 64, or as many as the text has.
        tests: positions tested a sequence; None tests all.
        layers: layer indices; default all.
        seed: of sampling and bootstrap.
        batch: sequences a forward pass; default about 4,096 tokens, on a GPU 65,536. Where memory does not hold so many
            it is half of them, and so on; no record depends on it.
        bos: "auto" (what the tokenizer does), "always" or "never".
        capture: "attention_interface" (transformers' registry), "transformer_lens" (the hooks of a TransformerBridge;
            one is made around a copy where none was given), or "auto": the latter for a TransformerBridge.
        examples: whether to decode each head's strongest associations for its page.
        resume: whether finished batches are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        parts: a folder to keep them in instead, where those of other processes may be (`measure_shard`).
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest; default the equivalent call's.

    Raises:
        UserError: the model or text cannot be measured; says what, where, what to do. Also where the
            certificate fails: no numbers are reported then.
    """
    started = time.monotonic()
    layers, seed = check_arguments(tests, layers, seed, batch, bos, progress)
    require_yes_or_no("resume", resume)
    folder, resume = (None, resume) if parts is None else (Path(parts), True)
    own = {"tests": tests, "seed": seed, "batch": batch, "bos": bos, "capture": capture}
    with (
        _reading(model, corpus, context, sequences, layers, progress, own) as read,
        read.pieces("measure", _of(read, own), resume, folder) as pieces,
    ):
        probe = _probe(read.handle, read.text, bos, seed)
        handle, shapes, stimuli = read.handle, read.shapes, read.text
        norms = find_norms(handle, torch.from_numpy(stimuli.tokens[0][None, :MIN_TOKENS]).long().to(handle.device))
        frames: dict[str, list[pd.DataFrame]] = {"records": [], "tests": [], "spectra": []}
        residuals: dict[int, list[float]] = {}
        rows = 0
        for part in _batches(read, probe, pieces, tests, seed, batch, (1, 1)):
            merge(residuals, part.residuals)
            shapes = [replace(info, between=part.between.get(info.layer, info.between)) for info in shapes]
            rows += part.rows_checked
            for name, frame in (("records", part.records), ("tests", part.tests), ("spectra", part.spectra)):
                if not frame.empty:
                    frames[name].append(frame)
        found = []
        if examples:
            read.stage("strongest associations", 0, 1)
            found = find_examples(handle, stimuli, norms, tests=tests, layers=read.layers, seed=seed)
            read.stage("strongest associations", 1, 1)
        arguments = read.arguments(**_shown(own))
    records = pd.concat(frames["records"], ignore_index=True).sort_values(
        ["stimuli", "sequence", "layer", "head"], ascending=[False, True, True, True], ignore_index=True
    )
    records["stimuli"] = records["stimuli"].astype("category")
    # the order is that of the text, whatever the batches were
    tested = pd.concat(frames["tests"]).sort_values(["sequence", "layer", "head", "position"], ignore_index=True)
    spectra = pd.concat(frames["spectra"]).sort_values(["sequence", "layer", "kv_head", "rank"])
    mean_spectra = spectra.groupby(["layer", "kv_head", "rank"])["eigenvalue"].mean().reset_index()
    measured = shapes_of(shapes, read.layers)
    manifest = describe_run(handle, shapes, measured, norms, stimuli, probe, records, arguments, command)
    if sequences is not None and sequences > len(stimuli.tokens):
        manifest["notes"].append(
            f"{sequences} sequences were asked for; the text has {len(stimuli.tokens)} of {arguments['context']} "
            "tokens."
        )
    manifest["certificate"] = {
        "tolerance": certificate.tolerance(handle.dtype),
        "largest": max(max(row) for row in residuals.values()),
        "by_layer": {str(layer): max(row) for layer, row in sorted(residuals.items())},
        "rows_checked": rows,
    }
    if pieces.work is not None:
        manifest["work"] = pieces.work
    manifest["wall_seconds"] = round(time.monotonic() - started, 1)
    run = Run(records, measured, store.Details(tested, mean_spectra, found), manifest)
    manifest["intervals"] = run.heads().attrs["intervals"]
    return run


def measure_shard(
    model: ModelHandle | str | Any = "demo",
    corpus: Corpus | Stimuli | str | Any = "demo",
    *,
    shard: tuple[int, int],
    parts: str | Path,
    context: int | None = None,
    sequences: int | None = None,
    tests: int | None = 64,
    layers: list[int] | None = None,
    seed: int = 0,
    batch: int | None = None,
    bos: str = "auto",
    capture: str = "auto",
    progress: Progress | Literal[False] | None = None,
) -> int:
    """Measure one of several shares of what `measure` would, and leave it for `measure(..., parts=parts)` to take up.

    That call, with the same arguments, gives what it would have given alone; it measures itself what no shard has left.

    Args:
        shard: (i, N) is the i-th of N shares, i from 1: every N-th batch.
        parts: a folder that all of them see, or that theirs are copied into.
        model, corpus, context, sequences, tests, layers, seed, batch, bos, capture, progress: as for `measure`.

    Returns:
        Batches of this share.

    Raises:
        UserError: as for `measure`; `shard` is no share; `parts` cannot be written.
    """
    layers, seed = check_arguments(tests, layers, seed, batch, bos, progress)
    i, of = shard
    require_whole("shards", of, 1)
    require_whole("shard", i, 1)
    if i > of:
        raise UserError(f"shard {i} of {of}: shards count from 1 to {of}")
    own = {"tests": tests, "seed": seed, "batch": batch, "bos": bos, "capture": capture}
    with (
        _reading(model, corpus, context, sequences, layers, progress, own) as read,
        read.pieces("measure", _of(read, own), True, Path(parts), stay=True) as pieces,
    ):
        probe = _probe(read.handle, read.text, bos, seed)
        done = sum(1 for _ in _batches(read, probe, pieces, tests, seed, batch, (i, of)))
        if pieces.folder is None:
            raise UserError(f"the share could not be kept in {parts}: free some space and measure it again")
    return done


def work_of(
    model: Any,
    corpus: Any,
    *,
    context: int | None,
    sequences: int | None,
    tests: int | None,
    layers: list[int] | None,
    seed: int,
    batch: int | None,
    bos: str,
    capture: str,
) -> str:
    """What `measure` with these arguments would write as "work" into its manifest: the same for the same numbers.

    Raises:
        UserError: as for `measure`.
    """
    own = {"tests": tests, "seed": seed, "batch": batch, "bos": bos, "capture": capture}
    with _reading(model, corpus, context, sequences, layers, False, own) as read:
        return digest(read.work("measure", _of(read, own)))


def _reading(
    model: Any,
    corpus: Any,
    context: int | None,
    sequences: int | None,
    layers: list[int] | None,
    progress: Progress | Literal[False] | None,
    own: dict[str, Any],
) -> AbstractContextManager[Reading]:
    return reading(
        model,
        corpus,
        context=context,
        sequences=sequences,
        usual_sequences=SEQUENCES,
        usual_context=CONTEXT,
        layers=layers,
        seed=own["seed"],
        bos=own["bos"],
        capture=own["capture"],
        progress=progress,
    )


def _of(read: Reading, own: dict[str, Any]) -> dict[str, Any]:
    """All that the records depend on beside model and text."""
    columns = [column.name for measure in all_measures() for column in measure.columns]
    return read.arguments(**_shown(own), columns=columns)


def _shown(own: dict[str, Any]) -> dict[str, Any]:
    """Arguments beside those that every reading has, as they took effect."""
    return own | {"tests": "all" if own["tests"] is None else own["tests"], "batch": own["batch"] or "auto"}


def _batches(
    read: Reading,
    probe: Stimuli,
    pieces: Pieces,
    tests: int | None,
    seed: int,
    batch: int | None,
    shard: tuple[int, int],
) -> Iterator[Batch]:
    """Certified batches of the text, then of the repeated random tokens."""
    for stimuli, label in ((read.text, "text sequences"), (probe, "repeated random tokens")):
        is_text = stimuli is read.text
        done, total = 0, len(stimuli.tokens)
        read.stage(label, 0, total)
        for part in certified(
            read.handle,
            stimuli,
            [measure for measure in all_measures() if measure.stimuli == stimuli.kind],
            tests=tests if is_text else None,
            layers=read.layers,
            batch=batch,
            seed=seed,
            keep=KEPT_SEQUENCES if is_text else 0,
            pieces=pieces,
            name=label,
            shard=shard,
        ):
            _require_finite(part.records)
            done += len(part.sequences)
            read.stage(label, done, total)
            yield part
        if done < total:
            read.stage(label, total, total)  # the others are of other shards


def _require_finite(records: pd.DataFrame) -> None:
    """UserError where what a head writes is beyond float32, so that its load could not be told from silence."""
    if "response_norm" in records.columns and np.isinf(records["response_norm"]).any():
        worst = records[np.isinf(records["response_norm"])].iloc[0]
        raise UserError(
            f"layer {worst['layer']} head {worst['head']} writes more than float32 holds: check the weights, or "
            "measure in float64"
        )


def _probe(handle: ModelHandle, stimuli: Stimuli, bos: str, seed: int) -> Stimuli:
    longest = max(len(t) for t in stimuli.tokens)
    return repeated_random_tokens(
        vocabulary_of(handle),
        length=probe_length(handle, min(PROBE_LENGTH, max(longest, 16))),
        sequences=PROBE_SEQUENCES,
        bos=bos if handle.tokenizer is not None else "never",
        seed=seed,
        below=handle.vocabulary_size,
    )


def probe_length(handle: ModelHandle, wanted: int) -> int:
    """`wanted`, or what the model's positions and two copies of different tokens of its vocabulary allow."""
    different = ordinary_token_ids(vocabulary_of(handle), handle.vocabulary_size)
    return min(wanted, handle.max_context or wanted, 2 * len(different))
