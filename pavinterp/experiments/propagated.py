"""Propagated: from one sequence to the rows that the tables of an error propagation are made of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from pavinterp.experiments.first_order import FirstOrder, first_order
from pavinterp.experiments.gains import TOGETHER, Passed, Stage, drawn, perturbed, relative_change, staged
from pavinterp.experiments.injections import KINDS, Weights
from pavinterp.models import ModelHandle

ALL = -1  # in the rows: all layers at once


def propagated(
    handle: ModelHandle,
    tokens: Int[Tensor, "1 n"],
    layers: Collection[int],
    strengths: list[float],
    draws: int,
    *,
    seed: int,
    sequence: int,
    weights: Weights,
    short: set[int],
) -> pd.DataFrame:
    """What perturbations of one sequence become: one layer at a time, then all of them at once.

    Args:
        handle, tokens, layers, weights, short, seed, sequence: as for `gains.end_gains`.
        strengths: increasing.
        draws: perturbations a layer and kind, over which squares are averaged.

    Returns:
        One row per kind x strength x layer (-1: all at once, the same perturbations) x block that the stream is looked
        at after (`to`, from the layer on): `change`, `normed` (relative changes, root mean square over draws),
        `divergence`, `loss_change` (means over draws, the same for every `to`). At the smallest strength:
        `first_order`, `first_order_divergence` (what Jacobian-vector products predict) and in the last block
        `apart` (norm of the difference of displacement and prediction, over that of the prediction); NaN where the
        model does not allow them, and `attrs["no_derivative"]` says why. Where all are perturbed, and `to` is the
        last block: `sum_change`, the relative change that the sum of the single displacements would be.
    """
    stage = staged(handle, tokens, layers, weights, short)
    rows: list[pd.DataFrame] = []
    why = ""
    for kind in KINDS:
        units = {
            layer: torch.stack([drawn(source, kind, seed, sequence, draw) for draw in range(draws)])
            for layer, source in sorted(stage.sources.items())
        }
        total: list[Any] = [0.0] * draws  # of single displacements at every strength
        for layer, unit in units.items():
            passed = [_at_strengths(stage, {layer: unit[draw]}, strengths) for draw in range(draws)]
            total = [so_far + one.displacement for so_far, one in zip(total, passed, strict=True)]
            frame = _rows(passed, kind, strengths, layer, layer)
            told = _first_order(stage, layer, unit)
            if isinstance(told, str):
                why = told
            else:
                _add_first_order(frame, told, passed, strengths[0])
            rows.append(frame)
        first = min(units)
        passed = [_at_strengths(stage, {i: u[draw] for i, u in units.items()}, strengths) for draw in range(draws)]
        frame = _rows(passed, kind, strengths, ALL, first)
        summed = _mean_square([relative_change(one, passed[0].stream) for one in total])
        frame.loc[frame["to"] == frame["to"].max(), "sum_change"] = summed
        rows.append(frame)
    result = pd.concat(rows, ignore_index=True)
    result.attrs["no_derivative"] = why
    return result


def _at_strengths(stage: Stage, deltas: dict[int, Tensor], strengths: list[float]) -> Passed:
    parts = [strengths[i : i + TOGETHER - 1] for i in range(0, len(strengths), TOGETHER - 1)]
    found = [perturbed(stage, {layer: delta[None] for layer, delta in deltas.items()}, part) for part in parts]
    arrays = {
        name: np.concatenate([getattr(one, name) for one in found])
        for name in ("changes", "normed", "divergence", "loss_change")
    }
    return Passed(**arrays, displacement=torch.cat([one.displacement for one in found]), stream=found[0].stream)


def _first_order(stage: Stage, layer: int, unit: Tensor) -> FirstOrder | str:
    found: list[FirstOrder] = []
    for part in unit.split(TOGETHER // 2):  # a derivative travels beside each row
        told = first_order(stage, layer, part)
        if isinstance(told, str):
            return told
        found.append(told)
    return FirstOrder(
        np.concatenate([one.changes for one in found]),
        np.concatenate([one.divergence for one in found]),
        torch.cat([one.displacement for one in found]),
    )


def _rows(passed: list[Passed], kind: str, strengths: list[float], layer: int, first: int) -> pd.DataFrame:
    """One row a strength and block, draws averaged."""
    changes, normed = (_mean_square([getattr(one, name) for one in passed]) for name in ("changes", "normed"))
    ends = {name: np.mean([getattr(one, name) for one in passed], axis=0) for name in ("divergence", "loss_change")}
    blocks = np.arange(first, changes.shape[1])
    frame = pd.DataFrame(
        {
            "kind": kind,
            "strength": np.repeat(strengths, len(blocks)),
            "layer": layer,
            "to": np.tile(blocks, len(strengths)),
            "change": changes[:, first:].ravel(),
            "normed": normed[:, first:].ravel(),
            **{name: np.repeat(values, len(blocks)) for name, values in ends.items()},
        }
    )
    for name in ("first_order", "first_order_divergence", "apart", "sum_change"):
        frame[name] = np.nan
    return frame


def _add_first_order(frame: pd.DataFrame, told: FirstOrder, passed: list[Passed], strength: float) -> None:
    here = frame["strength"] == strength
    blocks = frame.loc[here, "to"].to_numpy()
    frame.loc[here, "first_order"] = strength * _mean_square(list(told.changes))[blocks]
    frame.loc[here, "first_order_divergence"] = strength**2 * told.divergence.mean()
    predicted = strength * told.displacement
    measured = torch.stack([one.displacement[0] for one in passed])
    apart, size = (relative_change(x, passed[0].stream) for x in (measured - predicted, predicted))
    last = here & (frame["to"] == frame["to"].max())
    frame.loc[last, "apart"] = np.sqrt(np.square(apart).mean() / np.square(size).mean())


def _mean_square(parts: list[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    result: npt.NDArray[np.float64] = np.sqrt(np.square(np.stack(parts)).mean(0))
    return result
