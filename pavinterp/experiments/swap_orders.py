"""In which order heads are swapped, and how many of them, where the loss is followed from none to all."""

from __future__ import annotations

import numpy as np
import pandas as pd
from jaxtyping import Bool

STEPS = 8
RANDOM_ORDERS = STEPS  # balanced: of all of them together, every head is among the first eighth once
RANDOM = "random"


def numbers_swapped(heads: int) -> list[int]:
    """How many heads are swapped: none, all, and every eighth between."""
    return sorted({round(heads * step / STEPS) for step in range(STEPS + 1)})


def orders(
    costs: pd.DataFrame, loads: pd.DataFrame, in_a: Bool[np.ndarray, "sequences"], judged_a: bool, seed: int
) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Heads in the order in which they are swapped on one half of the sequences, found on the other half alone.

    Args:
        costs: one row per sequence x layer x head, column `cost`.
        loads: the same with the column `effective_load`.
        in_a: which sequences are in half a.
        judged_a: whether the order is for half a.
        seed: of the random orders, which are the same on both halves.

    Returns:
        By (order, draw) the heads by (layer, head), the first to be swapped first: `cost` (cheapest first), `load`
        (lightest first), `load_descending`, and `random` in several draws: one random order, begun at every eighth of
        it, so that where costs add up the mean over the draws is that over all orders. Heads whose number is missing
        come last.
    """
    other = np.flatnonzero(in_a != judged_a)

    def mean(frame: pd.DataFrame, column: str) -> pd.Series:
        return frame[frame["sequence"].isin(other)].groupby(["layer", "head"])[column].mean().sort_index()

    cost, load = mean(costs, "cost"), mean(loads, "effective_load")
    found = {
        ("cost", 0): cost.sort_values(kind="stable").index,
        ("load", 0): load.sort_values(kind="stable").index,
        ("load_descending", 0): load.sort_values(ascending=False, kind="stable").index,
    }
    shuffled = cost.index[np.random.default_rng([seed, 3]).permutation(len(cost))]
    starts = [round(len(cost) * draw / RANDOM_ORDERS) for draw in range(RANDOM_ORDERS)]
    found |= {(RANDOM, draw): shuffled[start:].append(shuffled[:start]) for draw, start in enumerate(starts)}
    return {key: [(int(layer), int(head)) for layer, head in order] for key, order in found.items()}
