"""Batches of a sweep whose certificate holds, taken from what an interrupted process has finished where it is there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import pandas as pd
import torch

from pavinterp.capture import certificate
from pavinterp.measures import Measure
from pavinterp.models import ModelHandle
from pavinterp.pieces import Pieces
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import Batch, batches, merge, require_known, sweep

# tokens that a forward pass reads, about: on a CPU more are no quicker; on a GPU as many as fit, up to these
BATCH_TOKENS = {"cpu": 4096, "cuda": 65536, "mps": 8192}


def batch_size(stimuli: Stimuli, batch: int | None, device: torch.device) -> int:
    """Sequences a forward pass: those asked for, or what `BATCH_TOKENS` says. `sweep` halves it where it does not fit.

    It is the same for every process on a kind of device, whatever memory is left there, so that shards and an
    interrupted run are of the same batches.
    """
    tokens = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
    return batch or max(1, tokens // max(map(len, stimuli.tokens)))


def certified(
    handle: ModelHandle,
    stimuli: Stimuli,
    measures: Sequence[Measure],
    *,
    tests: int | None,
    layers: set[int] | None,
    batch: int | None,
    seed: int,
    keep: int = 0,
    dtype: torch.dtype = torch.float32,
    pieces: Pieces | None = None,
    name: str = "",
    shard: tuple[int, int] = (1, 1),
) -> Iterator[Batch]:
    """What `sweep` yields, batch after batch, each once its certificate holds and all between is known.

    Args:
        handle, stimuli, measures, tests, layers, seed, keep, dtype: as for `sweep`.
        batch: as for `batch_size`.
        pieces: where finished batches are kept; None keeps nothing.
        name: of the sweep among the pieces.
        shard: (i, N) takes the i-th of every N batches, i from 1.

    Raises:
        UserError: the certificate fails, or something that is not a gate changes a layer's responses.
    """
    pieces, size = Pieces() if pieces is None else pieces, batch_size(stimuli, batch, handle.device)
    order = batches(stimuli, size)
    names = [f"{name}-{size}-{i}" for i in range(len(order))]
    mine = range(shard[0] - 1, len(order), shard[1])
    kept = {i: part for i in mine if (part := _read(pieces, names[i], order[i])) is not None}
    fresh = sweep(
        handle,
        stimuli,
        measures,
        tests=tests,
        layers=layers,
        batch=size,
        seed=seed,
        keep=keep,
        dtype=dtype,
        skip=set(range(len(order))) - set(mine) | set(kept),
    )
    residuals: dict[int, list[float]] = {}
    for i in mine:
        part = kept.pop(i, None)
        if part is None:
            part = next(fresh)
            merge(residuals, part.residuals)
            require_known(handle, part.between)
            certificate.require(residuals, handle.dtype, handle.architecture)
            _keep(pieces, names[i], part)
        yield part


def _keep(pieces: Pieces, name: str, part: Batch) -> None:
    """The records last: a batch is there when they are, and the frames that they name."""
    beside = {what: frame for what, frame in (("tests", part.tests), ("spectra", part.spectra)) if not frame.empty}
    for what, frame in beside.items():
        pieces.keep(f"{name}-{what}", frame)
    records = part.records.copy(deep=False)
    records.attrs = {
        "beside": list(beside),
        "rows_checked": part.rows_checked,
        "residuals": {str(layer): row for layer, row in part.residuals.items()},
        "between": {str(layer): what for layer, what in part.between.items()},
    }
    pieces.keep(name, records)


def _read(pieces: Pieces, name: str, indices: list[int]) -> Batch | None:
    records = pieces.read(name)
    if records is None:
        return None
    if sorted(set(records["sequence"])) != sorted(indices):
        warnings.warn(f"the part {name} in {pieces.folder} is of other sequences: measured again", stacklevel=2)
        return None
    told, records.attrs = records.attrs, {}
    beside = dict[str, pd.DataFrame]()
    for what in told["beside"]:
        frame = pieces.read(f"{name}-{what}")
        if frame is None:
            return None
        beside[what] = frame
    residuals, between = ({int(layer): x for layer, x in told[what].items()} for what in ("residuals", "between"))
    tests, spectra = (beside.get(what, pd.DataFrame()) for what in ("tests", "spectra"))
    return Batch(indices, records, tests, spectra, residuals, told["rows_checked"], between)
