"""verify(): whether a model can be measured, layer by layer, before anything is measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from pavinterp.capture import certificate
from pavinterp.capture.paths import capture_for, forward, on_path, path_of
from pavinterp.models import ModelHandle, load, untouched
from pavinterp.run import choose_layers, merge, probe_length, vocabulary_of
from pavinterp.stimuli import Stimuli, repeated_random_tokens
from pavinterp.sweep import inspect, sweep


def verify(
    model: ModelHandle | str | Any,
    *,
    sequences: int = 2,
    length: int = 256,
    layers: list[int] | None = None,
    seed: int = 0,
    capture: str = "auto",
) -> dict[str, Any]:
    """Whether a model can be measured: certificate per layer on random tokens, and that no layer sees the future.

    Returns:
        model, architecture, path, dtype, tolerance, largest, passed, future_safe (changing later tokens changed
        nothing earlier), future_change (largest relative change of earlier hidden states) and one dict per layer:
        layer, heads, kv_heads, d_k, d_v, window, residual.

    Raises:
        UserError: no attention can be captured.
    """
    handle = on_path(model if isinstance(model, ModelHandle) else load(model), capture)
    with untouched(handle.model):
        shapes = inspect(handle)
        chosen = choose_layers(shapes, layers)
        length = probe_length(handle, length)
        probe = repeated_random_tokens(
            vocabulary_of(handle), length=length, sequences=sequences, bos="never", seed=seed
        )
        residuals: dict[int, list[float]] = {}
        for part in sweep(handle, probe, [], tests=64, layers=chosen, batch=sequences, seed=seed):
            merge(residuals, part.residuals)
        change = _future_change(handle, probe)
    limit = certificate.tolerance(handle.dtype)
    largest = max(max(row) for row in residuals.values())
    rows = [
        asdict(info) | {"residual": max(residuals[info.layer])}
        for info in shapes
        if chosen is None or info.layer in chosen
    ]
    return {
        "model": handle.name,
        "architecture": handle.architecture,
        "path": path_of(handle),
        "dtype": str(handle.dtype).removeprefix("torch."),
        "tolerance": limit,
        "largest": largest,
        "future_safe": change <= limit,
        "future_change": change,
        "passed": bool(largest <= limit and change <= limit),
        "layers": rows,
    }


def _future_change(handle: ModelHandle, probe: Stimuli) -> float:
    """Largest relative change of earlier hidden states, with capture on, when the later half of the tokens changes."""
    tokens = torch.from_numpy(probe.tokens[0])[None].to(handle.device)
    half = tokens.shape[1] // 2
    other = tokens.clone()
    other[:, half:] = tokens[:, half:].flip(-1)
    with capture_for(handle, lambda call: None):
        before, after = (forward(handle, t)[:, :half].float() for t in (tokens, other))
    return float((before - after).norm() / before.norm())
