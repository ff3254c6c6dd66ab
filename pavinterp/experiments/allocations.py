"""Allocations: how many associations each head keeps, as candidates from few to all, and the first that is enough."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

Budgets = Int[np.ndarray, "heads"]
STEP = 1.02  # ratio of one multiple of the load to the next


def by_curves(
    divergence: Float[np.ndarray, "heads kept"], kept: Int[np.ndarray, "kept"], most: Budgets
) -> list[Budgets]:
    """Budgets of fewest associations in all for a sum of the heads' own divergences: by Lagrange multiplier.

    With a price of one association, each head keeps the `m` of the lowest divergence plus price: a corner of its
    curve's lower convex hull. As the price falls the heads go from corner to corner, the steepest step first.

    Args:
        divergence: of the predictions with that head alone cut, by number kept (nats).
        kept: increasing, from 1.
        most: associations that each head has at most; there its divergence is zero.

    Returns:
        Budgets of growing total, the first one association a head, the last `most`.
    """
    steps = []  # fall of divergence an association, head, budget after it
    for head, curve in enumerate(divergence):
        inside = kept < most[head]
        m = np.append(kept[inside], most[head]).astype(np.int64)
        y = np.append(curve[inside], 0.0)
        at = 0
        while at < len(m) - 1:
            slopes = (y[at] - y[at + 1 :]) / (m[at + 1 :] - m[at])
            best = len(slopes) - 1 - int(np.argmax(slopes[::-1]))  # of equal ones the farthest
            steps.append((-max(float(slopes[best]), 0.0), head, int(m[at + 1 + best])))
            at += 1 + best
    now = np.minimum(1, most)
    found = [now]
    for _, head, budget in sorted(steps, key=lambda step: step[0]):  # stable: a head's own steps stay in order
        now = now.copy()
        now[head] = budget
        found.append(now)
    return found


def by_load(load: Float[np.ndarray, "heads"], most: Budgets) -> list[Budgets]:
    """Budgets `ceil(c * load)` for growing `c`, from one association a head to `most`.

    A head whose load is undefined (NaN: it writes nothing) keeps one until all others keep all that they have.
    """
    known = ~np.isnan(load)
    found = [np.minimum(1, most)]
    if known.any():
        scale = 1 / load[known].max()
        while not (found[-1] >= most)[known].all():
            scaled = np.ones(len(load))
            scaled[known] = np.ceil(scale * load[known])
            now = np.minimum(scaled, most).astype(np.int64)
            if (now != found[-1]).any():
                found.append(now)
            scale *= STEP
    if (found[-1] != most).any():
        found.append(most.copy())
    return found


def alike(most: Budgets) -> list[Budgets]:
    """The same budget for all heads (or all that a head has): 1, 2, ..."""
    return [np.minimum(m, most) for m in range(1, int(most.max()) + 1)]


def spread(total: int, most: Budgets) -> Budgets:
    """The same budget for all heads, of a given total: where it does not divide, some evenly spaced heads get one more.

    Args:
        total: from one a head to the sum of `most`.
        most: associations that each head has at most.
    """
    even = next(m for m in range(int(most.max()), 0, -1) if np.minimum(m, most).sum() <= total)
    budgets = np.minimum(even, most)
    rest, open_to = total - int(budgets.sum()), np.flatnonzero(most > even)
    if rest:
        budgets[open_to[np.arange(rest) * len(open_to) // rest]] += 1
    return budgets


def smallest(candidates: list[Budgets], loss_of: Callable[[Budgets], float], most_loss: float) -> tuple[Budgets, float]:
    """The first of the candidates whose loss is at most `most_loss`, by bisection, and its loss.

    Loss need not fall from each candidate to the next: what is returned was measured to be within the limit, but a
    smaller one may be too.

    Args:
        candidates: of growing total; the last is taken to be within the limit.
        loss_of: measures one.
        most_loss: the limit.
    """
    low, high, losses = 0, len(candidates) - 1, dict[int, float]()
    while low < high:
        middle = (low + high) // 2
        losses[middle] = loss_of(candidates[middle])
        if losses[middle] <= most_loss:
            high = middle
        else:
            low = middle + 1
    if low not in losses:
        losses[low] = loss_of(candidates[low])
    return candidates[low], losses[low]
