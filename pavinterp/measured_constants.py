"""What a plan takes from a run: the load of its heads, the share that is distinct, gains by relative depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pavinterp.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from pavinterp.run import Run

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Constants:
    """Numbers that a plan rests on, and where they are from.

    Attributes:
        load: associations N that each head holds.
        distinct_share: effective number of distinct heads over the heads of a layer, mean over layers, in (0, 1].
        relative_depth, gains: [layers], increasing from 0 (first block) to 1 (last), and `G_l` (ratio of amplitudes)
            there; one entry of 1 where nothing was measured.
        measured, assumed: what was and what was not, in words.
    """

    load: float
    distinct_share: float
    relative_depth: Array
    gains: Array
    measured: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run | None, associations: float | None) -> Constants:
        """From a run and a load that overrides the measured one.

        Raises:
            UserError: neither gives a load, or a number in the run is missing or out of range.
        """
        if associations is None and run is None:
            raise UserError("associations: say how many each head holds, or give a run that measured it")
        measured: list[str] = []
        assumed: list[str] = []
        name = "" if run is None else str(run.manifest["model"]["name"])
        if associations is None:
            load, words = _load(run)
            measured.append(words)
        else:
            real = isinstance(associations, (int, float, np.integer, np.floating))
            if not real or isinstance(associations, bool) or not 1 <= associations < np.inf:
                raise UserError(f"associations must be a number of at least 1, got {associations!r:.40}")
            load = float(associations)
            assumed.append(f"{load:.4g} associations a head, in every design")
        layers = _layers(run, "redundancy", "distinct")
        share = 1.0
        if layers is None:
            assumed.append("heads all distinct (no redundancy in the run)" if run else "heads all distinct")
        else:
            share = float((layers["distinct"] / layers["heads"]).mean())
            if not 0 < share <= 1.001:
                raise UserError(f"redundancy of {name}: distinct heads over heads is {share:.3g}, not in (0, 1]")
            share = min(share, 1.0)
            measured.append(f"{share:.0%} of a layer's heads distinct ({len(layers)} layers)")
        places, gains = np.zeros(1), np.ones(1)
        layers = _layers(run, "propagate", "gain")
        if layers is None:
            assumed.append("gains 1 (no propagate in the run)" if run else "gains 1")
        else:
            assert run is not None
            depth = int(run.manifest["model"]["layers"])
            places = layers.index.to_numpy(np.float64) / max(1, depth - 1)
            gains = layers["gain"].to_numpy(np.float64)
            measured.append(f"gains {gains.min():.2g} to {gains.max():.2g} by relative depth ({len(layers)} layers)")
        assumed.append("isotropic CSs, the same load in every layer, KV heads that fail independently")
        return cls(load, share, places, gains, tuple(measured), tuple(assumed))

    def gains_of(self, depth: int) -> Array:
        """`G_l` [depth] of a design, linear between the measured layers at the same relative depth, flat beyond them.

        A single layer is its own last block: 1, as the gain of every last block.
        """
        if depth == 1:
            return np.ones(1)
        return np.interp(np.linspace(0, 1, depth), self.relative_depth, self.gains)


def _load(run: Any) -> tuple[float, str]:
    loads = run.heads()["effective_load"].to_numpy(np.float64)
    known = loads[np.isfinite(loads)]
    if not len(known) or known.mean() < 1:
        raise UserError(
            f"{run.manifest['model']['name']}: the run has no effective load to plan with: give associations"
        )
    low, high = np.quantile(known, [0.1, 0.9])
    return float(known.mean()), (
        f"{known.mean():.3g} associations a head (mean over {len(known)} heads of {run.manifest['model']['name']}; "
        f"tenths {low:.3g} to {high:.3g})"
    )


def _layers(run: Any, experiment: str, column: str) -> pd.DataFrame | None:
    """The experiment's layers with a number in that column, by layer; None where the run has none."""
    found = None if run is None else run.experiments.get(experiment)
    if found is None:
        return None
    layers: pd.DataFrame = found.frames["layers"]
    if "layer" in layers.columns:
        layers = layers.set_index("layer")
    layers = layers[np.isfinite(layers[column].to_numpy(np.float64))].sort_index()
    if layers.empty:
        return None
    if (layers[column] < 0).any():
        name = run.manifest["model"]["name"]
        raise UserError(f"{experiment} of {name}: a {column} below 0 in its layers: make it again")
    return layers
