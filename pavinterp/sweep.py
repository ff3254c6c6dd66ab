"""One pass of a model over stimuli: batches in, records out; nothing is kept from a layer but its numbers."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pavinterp.capture import certificate
from pavinterp.capture.call import AttentionCall, trials, window_start, working_dtype
from pavinterp.capture.gate import UNKNOWN, between, seen_gate
from pavinterp.capture.output_projection import output_weight, require_linear, write_factor
from pavinterp.capture.paths import capture_for, few_tokens, forward, path_of, require_witness
from pavinterp.errors import UserError
from pavinterp.exits import is_out_of_memory
from pavinterp.measures import Column, Measure
from pavinterp.measures.coherence import second_moment, spectrum
from pavinterp.models import ModelHandle
from pavinterp.sampling import sample_tests
from pavinterp.stimuli import Stimuli
from pavinterp.trials import Trials


@dataclass(frozen=True)
class LayerInfo:
    """What one attention layer is made of; `window` is None where every earlier position is visible.

    `softcap` bounds the scores where not None; `sinks`: whether the layer has learned sink logits; `between`: what
    changes the responses before `W_O`: None, "gate" (each multiplied with factors of its test), or "unknown".
    """

    layer: int
    heads: int
    kv_heads: int
    d_k: int
    d_v: int
    window: int | None
    softcap: float | None = None
    sinks: bool = False
    between: str | None = None


@dataclass
class Batch:
    """What one batch of sequences gave.

    Attributes:
        sequences: indices into the stimuli.
        records: one row per sequence x layer x head.
        tests: one row per kept test x layer x head.
        spectra: one row per kept sequence x layer x KV head x rank.
        residuals: by layer, the largest certificate residual of each head.
        rows_checked: rows the certificate compared.
        between: layers whose responses were changed before `W_O`, and by what: "gate" or "unknown".
    """

    sequences: list[int]
    records: pd.DataFrame
    tests: pd.DataFrame
    spectra: pd.DataFrame
    residuals: dict[int, list[float]]
    rows_checked: int
    between: dict[int, str] = field(default_factory=dict)


def inspect(handle: ModelHandle) -> list[LayerInfo]:
    """The model's attention layers, found by running it on eight tokens (or as many positions as it has).

    Raises:
        UserError: no attention goes through the registry, or a layer sees later positions.
    """
    found: dict[int, LayerInfo] = {}
    gates: dict[int, tuple[Tensor, Tensor]] = {}
    sees_future: list[int] = []

    def on_layer(call: AttentionCall) -> None:
        heads, kv_heads = call.queries.shape[1], call.keys.shape[1]
        if call.gated:
            gates[call.layer] = seen_gate(call, torch.arange(call.response.shape[1], device=call.response.device))
        found[call.layer] = LayerInfo(
            layer=call.layer,
            heads=heads,
            kv_heads=kv_heads,
            d_k=call.keys.shape[-1],
            d_v=call.values.shape[-1],
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks is not None,
        )
        if call.mask is None:
            later = not call.causal
        else:
            rows = call.mask[0, 0].float() if call.mask.dtype == torch.bool else call.mask[0, 0].float().exp()
            later = bool((rows.triu(1) > 0).any())
        if later:
            sees_future.append(call.layer)

    with capture_for(handle, on_layer):
        forward(handle, few_tokens(handle))
    if not found:
        raise UserError(
            f"{handle.architecture}: no attention layer could be captured by the path {path_of(handle)}: the model has "
            "no attention, or computes it in a way that this path does not see; try another --capture, or leave it out"
        )
    if sees_future:
        raise UserError(
            f"{handle.architecture}: layer {sees_future[0]} attends to later positions; pavinterp measures decoders"
        )
    changed = between(handle, few_tokens(handle), gates) if gates else {}
    return [replace(found[layer], between=changed.get(layer)) for layer in sorted(found)]


def require_known(handle: ModelHandle, between: Mapping[int, str | None]) -> None:
    """Stop where something else than a gate changes the responses of a layer that is to be measured.

    Args:
        handle: named in the message.
        between: by layer, what changes its responses.

    Raises:
        UserError: naming the first such layer.
    """
    for layer, what in sorted(between.items()):
        if what == UNKNOWN:
            raise UserError(
                f"{handle.architecture}: layer {layer}: between the attention and its output projection stands "
                "something else than a gate (a norm, a difference of two attentions, a hook), so what an association "
                "contributes is not defined; nothing was reported"
            )


def without_attention(handle: ModelHandle, shapes: Sequence[LayerInfo]) -> list[int]:
    """The model's layers that are not among `shapes`."""
    depth = getattr(handle.model.config.get_text_config(), "num_hidden_layers", len(shapes))
    return sorted(set(range(depth)) - {info.layer for info in shapes})


def batches(stimuli: Stimuli, size: int) -> list[list[int]]:
    """Indices of sequences, at most `size` a batch, the shortest first, each batch of one length.

    No sequence is ever padded: rotary embeddings whose frequencies depend on the length (dynamic, longrope) would take
    that of the longest for all of them.
    """
    lengths = np.array([len(tokens) for tokens in stimuli.tokens])
    of_length = [np.flatnonzero(lengths == length).tolist() for length in np.unique(lengths)]
    return [same[i : i + size] for same in of_length for i in range(0, len(same), size)]


@dataclass
class _Rows:
    """Numbers of one batch, still on the device: read once, when the batch has ended, so that no layer waits."""

    index: list[tuple[int, int, int, int]] = field(default_factory=list)  # sequence, layer, heads, group
    records: list[Tensor] = field(default_factory=list)  # [heads, columns]
    residuals: list[Tensor] = field(default_factory=list)  # [heads]
    tests: list[tuple[int, int, np.ndarray, np.ndarray, Tensor]] = field(default_factory=list)
    spectra: list[tuple[int, int, Tensor]] = field(default_factory=list)  # second moments of CSs
    gated: set[int] = field(default_factory=set)  # layers
    gates: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # those to be tested, of the first sequence
    wrong: list[tuple[int, Tensor]] = field(default_factory=list)  # layer, what `_wrong` says
    checked: int = 0  # rows the certificate compared


def sweep(
    handle: ModelHandle,
    stimuli: Stimuli,
    measures: Sequence[Measure],
    *,
    tests: int | None,
    layers: set[int] | None,
    batch: int,
    seed: int,
    keep: int = 0,
    dtype: torch.dtype = torch.float32,
    skip: Collection[int] = (),
) -> Iterator[Batch]:
    """Measure every sequence.

    Args:
        handle: the model.
        stimuli: what it reads.
        measures: those for this kind of stimuli.
        tests: tests sampled a sequence; None tests every position.
        layers: layers to measure; None is all.
        batch: sequences a forward pass; where memory does not hold so many, half of them, and so on.
        seed: of the sampling. What a sequence gives depends on it and the sequence, not on the batch.
        keep: of the first so many sequences the single tests and the CS spectra are returned too.
        dtype: of the numbers in the records.
        skip: batches, by their place in `batches(stimuli, batch)`, that are not wanted.

    Yields:
        One Batch after another; the model is as it was in between.

    Raises:
        UserError: the certificate fails.
    """
    how: dict[str, Any] = {"tests": tests, "layers": layers, "seed": seed, "keep": keep, "dtype": dtype}
    kept = _Kept()
    fit = batch  # sequences that memory holds, as far as is known
    for place, left in enumerate(batches(stimuli, batch)):
        if place in skip:
            continue
        parts: list[Batch] = []
        while left:
            read, too_many = left[:fit], False
            try:
                parts.append(_one_batch(handle, stimuli, measures, kept, read, **how))
                left = left[fit:]
            except (RuntimeError, MemoryError) as error:
                too_many = is_out_of_memory(error) and len(read) > 1
                if not too_many:
                    raise
            if too_many:  # the exception is gone by now, and with it what did not fit
                fit = len(read) // 2
                warnings.warn(f"{len(read)} sequences do not fit into memory: going on with {fit}", stacklevel=2)
                if handle.device.type == "cuda":
                    torch.cuda.empty_cache()
        yield parts[0] if len(parts) == 1 else _together(parts)


@dataclass
class _Kept:
    """What one batch tells the next: of each layer the same."""

    factors: dict[int, Float[Tensor, "heads d_v d_w"]] = field(default_factory=dict)
    tested: dict[int, str] = field(default_factory=dict)  # layers with something between, and what
    expected: set[int] | None = None  # layers of the first pass: every other has the same


def _one_batch(
    handle: ModelHandle,
    stimuli: Stimuli,
    measures: Sequence[Measure],
    kept: _Kept,
    indices: list[int],
    *,
    tests: int | None,
    layers: set[int] | None,
    seed: int,
    keep: int,
    dtype: torch.dtype,
) -> Batch:
    """What one forward pass over the sequences of these indices gives."""
    columns = [column for measure in measures for column in measure.columns]
    factors, tested = kept.factors, kept.tested
    sampled = [
        sample_tests(len(stimuli.tokens[i]), tests, np.random.default_rng([seed, i, stimuli.kind == "text"]))
        for i in indices
    ]
    tokens = torch.from_numpy(np.stack([stimuli.tokens[i] for i in indices])).long().to(handle.device)
    on_device = [  # once, not at every layer: a copy to a GPU waits for it
        (torch.from_numpy(positions).to(tokens.device), torch.from_numpy(weights).to(tokens.device, torch.float32))
        for positions, weights in sampled
    ]
    rows, seen = _Rows(), set[int]()

    def on_layer(call: AttentionCall) -> None:
        heads, d_v = call.queries.shape[1], call.values.shape[-1]
        if call.layer in seen:
            raise UserError(
                f"layer {call.layer} was called twice in one forward pass: its heads' numbers would be mixed"
            )
        seen.add(call.layer)
        if call.gated:
            rows.gated.add(call.layer)
            # the model's own gates are tested once; what hooks do may change from batch to batch
            if call.hooked or call.layer not in tested:
                rows.gates[call.layer] = seen_gate(call, torch.from_numpy(sampled[0][0]).to(tokens.device))
        if call.layer not in factors:
            weight = output_weight(call.projection, heads, d_v)
            require_linear(call, weight)
            factors[call.layer] = write_factor(weight, working_dtype(call))
        for row, i in enumerate(indices):
            one = trials(
                call,
                row,
                tokens[row],
                *on_device[row],
                factors[call.layer],
                rng_seed=seed * 1_000_003 + i,
            )
            rows.wrong.append((call.layer, _wrong(one, call)))
            numbers, residual = _numbers(one, call, row, measures)
            rows.residuals.append(residual)
            rows.checked += heads * len(sampled[row][0])
            _keep(one, columns, numbers, i, rows, sampled[row] if i < keep else None)

    with capture_for(handle, on_layer, layers):
        states = forward(handle, tokens)
    require_witness(handle, tokens, states)
    kept.expected = seen if kept.expected is None else kept.expected
    if not seen:
        raise UserError(f"{handle.architecture}: no attention layer was captured by the path {path_of(handle)}")
    if seen != kept.expected:
        raise UserError(
            f"layers {sorted(kept.expected ^ seen)} were captured in some forward passes and not in others: has "
            "another thread changed the model's attention implementation?"
        )
    if rows.gates:
        for layer, what in between(handle, tokens, rows.gates).items():
            tested[layer] = UNKNOWN if UNKNOWN in (what, tested.get(layer)) else what
    _require_right(handle, rows)
    part = _read(rows, indices, stimuli, columns, dtype)
    return replace(part, between={layer: tested[layer] for layer in sorted(rows.gated)})


def _together(parts: list[Batch]) -> Batch:
    """Batches of which each was a part of one."""
    residuals: dict[int, list[float]] = {}
    for part in parts:
        merge(residuals, part.residuals)
    between = {layer: what for part in parts for layer, what in part.between.items()}
    between |= {layer: UNKNOWN for part in parts for layer, what in part.between.items() if what == UNKNOWN}
    frames = {name: [getattr(part, name) for part in parts] for name in ("records", "tests", "spectra")}
    return Batch(
        sequences=[i for part in parts for i in part.sequences],
        **{name: pd.concat(some, ignore_index=True) for name, some in frames.items()},
        residuals=residuals,
        rows_checked=sum(part.rows_checked for part in parts),
        between=between,
    )


def merge(residuals: dict[int, list[float]], more: dict[int, list[float]]) -> None:
    """Keep the larger residual of each head, in place."""
    for layer, row in more.items():
        residuals[layer] = np.maximum(residuals.get(layer, row), row).tolist()


def _wrong(one: Trials, call: AttentionCall) -> Bool[Tensor, "2"]:
    """Whether a test sees later positions; whether its window is another than the one that its kernel was told of."""
    place = torch.arange(one.keys.shape[1], device=one.keys.device)
    seen = one.bias > float("-inf")
    used = seen if one.given_strengths is None else one.given_strengths != 0
    future = (used & (place > one.tests[:, None])).any()
    if call.window is None or call.mask is None:
        return torch.stack([future, torch.zeros_like(future)])
    start = window_start(call, one.tests)
    farther = (seen & (place < start[:, None])).any()
    nearer = ~seen[:, -1, start[-1]].all()
    return torch.stack([future, farther | nearer])


def _require_right(handle: ModelHandle, rows: _Rows) -> None:
    wrong = torch.stack([what.to(rows.wrong[0][1].device) for _, what in rows.wrong]).cpu()
    for (layer, _), (future, window) in zip(rows.wrong, wrong.tolist(), strict=True):
        if future:
            raise UserError(
                f"{handle.architecture}: layer {layer} attends to later positions; pavinterp measures decoders"
            )
        if window:
            raise UserError(
                f"{handle.architecture}: layer {layer}: the sliding window in its mask is not the one that its module "
                "names: has the configuration been changed since the model was made? Make it anew with that window (or "
                "without one, where the model does not apply it)"
            )


def _numbers(
    one: Trials, call: AttentionCall, sequence: int, measures: Sequence[Measure]
) -> tuple[dict[str, Tensor], Float[Tensor, "heads"]]:
    """Every measure's numbers and the certificate's residual, tile by tile, put together along the heads."""
    parts, residuals = [], []
    for tile in one.tiles():
        parts.append({name: value for measure in measures for name, value in measure(tile).items()})
        residuals.append(certificate.residual(call, sequence, tile))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, torch.cat(residuals)


def _keep(
    one: Trials,
    columns: list[Column],
    numbers: dict[str, Tensor],
    sequence: int,
    rows: _Rows,
    kept: tuple[np.ndarray, np.ndarray] | None,
) -> None:
    """Reduce the numbers of one sequence and layer to records; keep its tests (positions, weights) where given."""
    record = dict(numbers)
    for over, reduce in (("median", weighted_median), ("mean", weighted_mean)):  # all columns at once: fewer kernels
        names = [column.name for column in columns if column.over_tests == over]
        if names:
            reduced = reduce(torch.cat([numbers[name] for name in names]), one.weights)
            record |= dict(zip(names, reduced.split(one.heads), strict=True))
    values = [record[column.name] for column in columns]
    per_test = [numbers[column.name] for column in columns if column.over_tests]
    rows.index.append((sequence, one.layer, one.heads, one.group))
    rows.records.append(torch.stack(values, dim=-1) if values else one.keys.new_empty(one.heads, 0))
    if kept is not None:
        rows.tests.append((sequence, one.layer, *kept, torch.stack(per_test, dim=-1)))
        rows.spectra.append((sequence, one.layer, second_moment(one)))


def weighted_median(values: Float[Tensor, "heads tests"], weights: Float[Tensor, "tests"]) -> Float[Tensor, "heads"]:
    """Smallest value at which at least half of the weight lies at or below; NaN tests do not count."""
    ordered, order = values.sort(-1)  # NaN sorts last
    weight = weights[order].masked_fill(ordered.isnan(), 0.0)
    cumulative = weight.cumsum(-1)
    total = cumulative[:, -1:]
    index = (cumulative < 0.5 * total).sum(-1, keepdim=True).clamp_max(values.shape[-1] - 1)
    return torch.where(total > 0, ordered.gather(-1, index), float("nan"))[:, 0]


def weighted_mean(values: Float[Tensor, "heads tests"], weights: Float[Tensor, "tests"]) -> Float[Tensor, "heads"]:
    """Mean by weight; NaN tests do not count; NaN where no test does."""
    there = ~values.isnan()
    return (values.nan_to_num() * weights).sum(-1) / (there * weights).sum(-1)


def _read(rows: _Rows, indices: list[int], stimuli: Stimuli, columns: list[Column], dtype: torch.dtype) -> Batch:
    """Fetch a batch's numbers from the device and lay them out as frames."""
    values = torch.cat(rows.records).to(dtype).cpu().numpy()
    residual = torch.cat(rows.residuals).double().cpu().numpy()
    heads = np.array([heads for _, _, heads, _ in rows.index])
    each = np.repeat(np.arange(len(heads)), heads)
    sequence, layer, _, group = (np.array(x)[each] for x in zip(*rows.index, strict=True))
    head = np.concatenate([np.arange(h) for h in heads])
    records = pd.DataFrame(
        {
            "stimuli": pd.Categorical([stimuli.kind] * len(head)),
            "sequence": sequence.astype(np.int32),
            "document": stimuli.document[sequence].astype(np.int32),
            "layer": layer.astype(np.int16),
            "head": head.astype(np.int16),
            "kv_head": (head // group).astype(np.int16),
        }
        | {column.name: values[:, i] for i, column in enumerate(columns)}
    )
    residuals: dict[int, list[float]] = {}
    for number in np.unique(layer):
        here = layer == number
        count = int(head[here].max()) + 1
        residuals[int(number)] = residual[here].reshape(-1, count).max(0).tolist()
    tests = _test_frame(rows, [column.name for column in columns if column.over_tests])
    return Batch(indices, records, tests, _spectra_frame(rows), residuals, rows.checked)


def _test_frame(rows: _Rows, columns: list[str]) -> pd.DataFrame:
    frames = []
    for sequence, layer, positions, weights, values in rows.tests:
        heads, count, _ = values.shape
        frame = pd.DataFrame(values.float().cpu().numpy().reshape(heads * count, -1), columns=columns)
        frame.insert(0, "sequence", np.int32(sequence))
        frame.insert(1, "layer", np.int16(layer))
        frame.insert(2, "head", np.repeat(np.arange(heads, dtype=np.int16), count))
        frame.insert(3, "position", np.tile(positions.astype(np.int32), heads))
        frame.insert(4, "weight", np.tile(weights.astype(np.float32), heads))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _spectra_frame(rows: _Rows) -> pd.DataFrame:
    frames = []
    for sequence, layer, moment in rows.spectra:
        values = spectrum(moment)
        kv_heads, ranks = values.shape
        frames.append(
            pd.DataFrame(
                {
                    "sequence": np.int32(sequence),
                    "layer": np.int16(layer),
                    "kv_head": np.repeat(np.arange(kv_heads, dtype=np.int16), ranks),
                    "rank": np.tile(np.arange(1, ranks + 1, dtype=np.int16), kv_heads),
                    "eigenvalue": values.float().numpy().ravel(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
