"""verify(): whether a model can be measured, layer by layer, before anything is measured."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from pavinterp.capture import certificate
from pavinterp.capture.gate import UNKNOWN
from pavinterp.capture.paths import TRANSFORMER_LENS, capture_for, forward, on_path, path_of
from pavinterp.errors import UserError
from pavinterp.measures import all_measures
from pavinterp.measuring import probe_length
from pavinterp.models import ModelHandle, load, untouched
from pavinterp.positions import PADS, padding_change, position_scheme
from pavinterp.reading import choose_layers, shapes_of, vocabulary_of
from pavinterp.stimuli import Stimuli, repeated_random_tokens
from pavinterp.sweep import inspect, merge, sweep, without_attention


def verify(
    model: ModelHandle | str | Any,
    *,
    sequences: int = 2,
    length: int = 256,
    layers: list[int] | None = None,
    seed: int = 0,
    capture: str = "auto",
) -> dict[str, Any]:
    """Whether a model can be measured: certificate per layer on random tokens, and checks that need no other witness.

    Returns:
        model, architecture, path, dtype, tolerance, largest, passed; future_safe (changing later tokens changed
        nothing earlier), future_change (largest relative change of earlier hidden states); batch_change (largest
        relative change of a head's load when sequences are read one by one); positions (how they enter the model);
        padding_change (largest relative change of final hidden states by padding a sequence, by side; pavinterp pads
        nothing, so that it does not count for passed); agreement (largest relative difference
        of a load by the other path, None where there is no other, and no_other_path says why) and
        agreement_tolerance; skipped (layers without attention); and one dict per layer: layer, heads, kv_heads, d_k,
        d_v, window, softcap, sinks, between (what changes responses before W_O: None, gate, unknown), residual (inf
        where that is unknown).

    Raises:
        UserError: no attention can be captured.
    """
    plain = model if isinstance(model, ModelHandle) else load(model)
    handle = on_path(plain, capture)
    with untouched(handle.model):
        shapes = inspect(handle)
        chosen = choose_layers(shapes, layers)
        length = probe_length(handle, length)
        probe = repeated_random_tokens(
            vocabulary_of(handle),
            length=length,
            sequences=sequences,
            bos="never",
            seed=seed,
            below=handle.vocabulary_size,
        )
        residuals: dict[int, list[float]] = {}
        between: dict[int, str] = {}
        loads = _loads(handle, probe, chosen, seed, sequences, residuals, between)
        batch_change = _difference(loads, _loads(handle, probe, chosen, seed, 1, residuals, between))
        shapes = [replace(info, between=between.get(info.layer, info.between)) for info in shapes]
        change = _future_change(handle, probe)
    with untouched(plain.model):
        scheme = position_scheme(handle, plain)
        padding = padding_change(plain, torch.from_numpy(probe.tokens[0][None, : length - PADS]).to(plain.device))
    agreement, no_other_path = _agreement(handle, probe, chosen, seed, loads)
    limit = certificate.tolerance(handle.dtype)
    agreement_limit = max(1e-4, 10 * limit)  # two ways to sum in every layer before; 1e-4 in float32
    rows = [
        asdict(info) | {"residual": float("inf") if info.between == UNKNOWN else float(np.max(residuals[info.layer]))}
        for info in shapes_of(shapes, chosen)
    ]
    largest = float(np.max([row["residual"] for row in rows]))  # NaN stays NaN, and has not passed
    holds = [largest <= limit, change <= limit, batch_change <= agreement_limit, (agreement or 0) <= agreement_limit]
    return {
        "model": handle.name,
        "architecture": handle.architecture,
        "path": path_of(handle),
        "dtype": str(handle.dtype).removeprefix("torch."),
        "tolerance": limit,
        "largest": largest,
        "future_safe": change <= limit,
        "future_change": change,
        "batch_change": batch_change,
        "positions": scheme,
        "padding_change": padding,
        "agreement": agreement,
        "agreement_tolerance": agreement_limit,
        "no_other_path": no_other_path,
        "skipped": without_attention(handle, shapes),
        "passed": all(holds),
        "layers": rows,
    }


def _loads(
    handle: ModelHandle,
    probe: Stimuli,
    layers: set[int] | None,
    seed: int,
    batch: int,
    residuals: dict[int, list[float]],
    between: dict[int, str],
) -> npt.NDArray[np.float64]:
    """Effective load of every sequence x layer x head, in that order; merges residuals and `between`."""
    frames = []
    load_only = [measure for measure in all_measures() if measure.name == "load"]
    for part in sweep(handle, probe, load_only, tests=64, layers=layers, batch=batch, seed=seed):
        frames.append(part.records)
        merge(residuals, part.residuals)
        between |= {layer: what for layer, what in part.between.items() if between.get(layer) != UNKNOWN}
    return pd.concat(frames).sort_values(["sequence", "layer", "head"])["effective_load"].to_numpy(np.float64)


def _difference(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> float:
    """Largest relative difference; heads without a load, which are so by both, are left out."""
    if one.shape != two.shape or (np.isnan(one) != np.isnan(two)).any():
        return float("inf")
    return float(np.nanmax(np.abs(one - two) / one, initial=0.0))


def _agreement(
    handle: ModelHandle, probe: Stimuli, layers: set[int] | None, seed: int, loads: npt.NDArray[np.float64]
) -> tuple[float | None, str]:
    """Largest relative difference of a load by the other path; None and why where there is no other."""
    if handle.bridge is not None:
        return None, "the model is in a TransformerBridge, whose attention does not go through the registry"
    try:
        other = on_path(handle, TRANSFORMER_LENS)
        with untouched(other.model):
            residuals: dict[int, list[float]] = {}
            between: dict[int, str] = {}
            theirs = _loads(other, probe, layers, seed, len(probe.tokens), residuals, between)
            certificate.require(residuals, handle.dtype, handle.architecture)
            return _difference(loads, theirs), ""
    except UserError as error:
        return None, str(error).removesuffix(": leave --capture out")


def _future_change(handle: ModelHandle, probe: Stimuli) -> float:
    """Largest relative change of earlier hidden states, with capture on, when the later half of the tokens changes."""
    tokens = torch.from_numpy(probe.tokens[0])[None].to(handle.device)
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = tokens[:, half:].flip(-1)
    with capture_for(handle, lambda call: None):
        before, after = (forward(handle, t)[:, :half].float() for t in (tokens, other))
    return float((before - after).norm() / before.norm())
