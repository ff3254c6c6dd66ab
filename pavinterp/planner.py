"""The trade-off planner: which depth, width, heads and `d_k` a parameter budget is best spent on, by the theory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from pavinterp.arguments import require_one_of, require_whole, require_yes_or_no, whole_numbers
from pavinterp.errors import UserError
from pavinterp.experiment import definitions
from pavinterp.measured_constants import Constants
from pavinterp.theory.propagation import (
    COMBINATIONS,
    Combination,
    layer_error,
    llama_parameters,
    log_reliability,
    retrieval_error,
)

if TYPE_CHECKING:
    from pavinterp.run import Run

D_K = (8, 16, 32, 64, 128, 256)
DEEPEST = 64
SHAPE = ["depth", "d_model", "heads", "kv_heads", "d_k", "mlp"]
NEAR = (0.01, 0.05)
COLUMNS = {
    "depth": ("layers", "Decoder blocks."),
    "d_model": ("dimensions", "Width of the residual stream: heads x d_k."),
    "heads": ("count", "Query heads a layer."),
    "kv_heads": ("count", "Key-value heads a layer: memories; query heads that share one read the same."),
    "d_k": ("dimensions", "Of keys, queries and values of a head."),
    "mlp": ("dimensions", "Inner width of the gated MLP: what heads leave of the budget."),
    "parameters": ("count", "Of the whole model, output matrix tied to the embedding unless said otherwise."),
    "eps": ("fraction of power", "Error of one head: (N - 1) / (N - 1 + d_k) at the associations planned for."),
    "redundancy": ("heads", "r: heads of a layer that fail independently; kv_heads times the distinct share."),
    "layer_error": ("fraction of power", "eps^r (any), or (N - 1) / (N - 1 + r d_k) (summed); before gains."),
    "reliability": (
        "probability",
        "prod (1 - min(1, G^2 error)) over hops in series; a hop is a layer if not given.",
    ),
    "log_reliability": ("nats", "Natural logarithm of reliability, for those too small for a float."),
}
"""Units and definitions of a plan's columns."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Designs of one parameter budget, the most reliable first.

    Attributes:
        designs: a row a design; columns `COLUMNS`, with "units" and "descriptions" in `.attrs`.
        flat: a row for `within` = 0.01 and 0.05: `designs` whose reliability is at most so far (a fraction) below the
            optimum's, and the least and most `depth`, `heads`, `kv_heads` and `d_k` among them.
        manifest: budget and arguments; `measured` and `assumed`, what each number rests on, in words.
    """

    designs: pd.DataFrame
    flat: pd.DataFrame
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def optimum(self) -> pd.Series:
        """The most reliable design; of equals the one with fewest layers, then fewest parameters."""
        return self.designs.iloc[0]

    def __repr__(self) -> str:
        best = self.optimum
        return (
            f"Plan({len(self.designs)} designs; best: {best['depth']:.0f} layers of {best['heads']:.0f} heads of "
            f"{best['d_k']:.0f}, reliability {best['reliability']:.3g}; .designs, .optimum, .flat, .manifest)"
        )


def plan(
    parameters: int,
    associations: float | None = None,
    *,
    measured: Run | None = None,
    kv_heads: int | str | None = None,
    d_k: Sequence[int] = D_K,
    depth: Sequence[int] = tuple(range(1, DEEPEST + 1)),
    mlp_ratio: float = 8 / 3,
    vocabulary: int = 32_000,
    tied: bool = True,
    combination: Combination = "summed",
    hops: int | None = None,
) -> Plan:
    """How reliably the designs that a parameter budget allows retrieve, by the model of `theory.propagation`.

    Every depth, `d_k` and size of a query group; `d_model = heads x d_k`, as many heads as fit. Layers are in series,
    each with the same load and as many independent memories as it has KV heads. It is an order of designs, not a
    forecast: heads of a trained softmax model retrieve far better than the linear memory that `eps` is of.

    Args:
        parameters: budget, of the whole model, at least 1,000.
        associations: N that each head holds, at least 1; default the mean over the measured run's heads of their median
            effective load.
        measured: a run, for its heads' load (unless `associations` is given) and, if they were added to it, from
            `redundancy` the share of heads that are distinct, from `propagate` gains by relative depth.
        kv_heads: KV heads of each layer, "all" for as many as heads; None tries groups of 1, 2, 4 and 8 query heads.
        d_k, depth: what is tried.
        mlp_ratio: least inner width of the MLP over d_model; it grows, in steps of 8, into what is left of the budget.
        vocabulary: tokens.
        tied: whether the output matrix is the embedding.
        combination: "summed" (what heads write adds up) or "any" (the paper's: one head that is right suffices).
        hops: retrievals in series that are needed; layers beyond are further tries at them. None is the paper's: one a
            layer, so that of equal widths the shallowest is always best.

    Raises:
        UserError: an argument makes no sense, the run lacks what is asked of it, or no design fits.
    """
    require_whole("parameters", parameters, 1000)
    require_whole("vocabulary", vocabulary, 1)
    require_yes_or_no("tied", tied)
    widths, depths = whole_numbers("d_k", d_k, 1) or [], whole_numbers("depth", depth, 1) or []
    if not widths or not depths:
        raise UserError("d_k and depth need at least one number each to try")
    if kv_heads not in (None, "all"):
        require_whole("kv_heads", kv_heads, 1, ', "all" or None')
    require_one_of("combination", combination, COMBINATIONS)
    if hops is not None:
        require_whole("hops", hops, 1)
    _require_real("mlp_ratio", mlp_ratio, above=0)
    constants = Constants.of(measured, associations)
    shapes = _shapes(int(parameters), kv_heads, sorted({*widths}), sorted({*depths}), mlp_ratio, vocabulary, tied)
    shapes = shapes[shapes["depth"] >= (hops or 1)]
    if shapes.empty:
        given = {"vocabulary": f"{vocabulary:,}", "kv_heads": kv_heads, "hops": hops}
        with_ = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise UserError(f"no design with {with_} has as few as {parameters:,} parameters: change one of them")
    designs = rate(shapes, constants.load, combination=combination, hops=hops, constants=constants)
    keys = ["log_reliability", "depth", "parameters", "d_k", "kv_heads"]
    designs = designs.sort_values(keys, ascending=[False, True, True, True, True], kind="stable", ignore_index=True)
    designs.attrs = definitions({name: COLUMNS[name] for name in designs.columns})
    arguments = {
        "parameters": int(parameters), "associations": constants.load, "kv_heads": kv_heads, "d_k": widths,
        "depth": depths, "mlp_ratio": mlp_ratio, "vocabulary": vocabulary, "tied": tied,
        "combination": combination, "hops": hops,
    }  # fmt: skip
    said = {"measured": constants.measured, "assumed": constants.assumed}
    return Plan(designs, flatness(designs), {"arguments": arguments, **said})


def rate(
    designs: pd.DataFrame,
    associations: float,
    *,
    combination: Combination = "summed",
    hops: int | None = None,
    constants: Constants | None = None,
) -> pd.DataFrame:
    """The designs with `eps`, `redundancy`, `layer_error`, `reliability`, `log_reliability` beside, in their order.

    Args:
        designs: with `depth`, `kv_heads` and `d_k`.
        associations: N that each head holds, at least 1.
        combination, hops: as in `plan`; a design of fewer layers than hops has reliability 0.
        constants: measured share of distinct heads and gains; default all heads are distinct, gains 1.

    Raises:
        UserError: a column is missing, or an argument makes no sense.
    """
    require_one_of("combination", combination, COMBINATIONS)
    if hops is not None:
        require_whole("hops", hops, 1)
    _require_real("associations", associations, above=1, closed=True)
    if missing := [name for name in ("depth", "kv_heads", "d_k") if name not in designs.columns]:
        raise UserError(f"designs need the columns depth, kv_heads and d_k; missing: {', '.join(missing)}")
    known = constants or Constants.of(None, associations)
    width = designs["d_k"].to_numpy(np.float64)
    copies = np.maximum(1.0, known.distinct_share * designs["kv_heads"].to_numpy(np.float64))
    logs = np.array(
        [
            _log_reliability(int(depth), hops, associations, one, r, combination, known)
            for depth, one, r in zip(designs["depth"], width, copies, strict=True)
        ]
    )
    return designs.assign(
        eps=retrieval_error(associations, width),
        redundancy=copies,
        layer_error=layer_error(associations, width, copies, combination),
        reliability=np.exp(logs),
        log_reliability=logs,
    )


def _log_reliability(
    depth: int, hops: int | None, load: float, d_k: float, copies: float, combination: Combination, known: Constants
) -> float:
    """Of one design: layers in a row share out the hops; a hop has the heads of all its layers to be retrieved by."""
    if hops is not None and hops > depth:
        return -math.inf
    parts = np.array_split(known.gains_of(depth), hops or depth)
    errors = layer_error(load, d_k, copies * np.array([len(part) for part in parts]), combination)
    return log_reliability(errors, gains=np.array([np.sqrt((part**2).mean()) for part in parts]))


def flatness(designs: pd.DataFrame) -> pd.DataFrame:
    """By `within` (0.01, 0.05): how many designs lie so near the best one's reliability, and how different they are."""
    best = designs["log_reliability"].max()
    rows = {}
    for within in NEAR:
        # all that are as unreliable as can be are equal: -inf less -inf is no number
        near = designs[
            (designs["log_reliability"] >= best + math.log1p(-within)) | (designs["log_reliability"] == best)
        ]
        rows[within] = {"designs": len(near)} | {
            f"{name}_{end}": int(getattr(near[name], end)())
            for name in ("depth", "heads", "kv_heads", "d_k")
            for end in ("min", "max")
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("within")


def _shapes(
    budget: int,
    kv_heads: int | str | None,
    widths: list[int],
    depths: list[int],
    mlp_ratio: float,
    vocabulary: int,
    tied: bool,
) -> pd.DataFrame:
    """Of each depth, d_k and query group the design with most heads, its MLP taking the rest; each once."""
    rows: dict[tuple[int, ...], int] = {}

    def count(shape: dict[str, int]) -> int:
        return llama_parameters(**shape, vocabulary=vocabulary, tied=tied)

    groups = (1,) if kv_heads == "all" else (1, 2, 4, 8) if kv_heads is None else (0,)
    for depth, width, group in itertools.product(depths, widths, groups):
        of_size = partial(_shape, depth, width, group, kv_heads, mlp_ratio)
        most = _largest(_composed(count, of_size), budget)
        if most > 0:
            fill = partial(_wider, of_size(most))
            best = fill(_largest(_composed(count, fill), budget))
            rows[tuple(best.values())] = count(best)
    table = pd.DataFrame(list(rows), columns=SHAPE, dtype=np.int64)
    return table.assign(parameters=np.array(list(rows.values()), dtype=np.int64))


def _shape(
    depth: int, width: int, group: int, kv_heads: int | str | None, mlp_ratio: float, times: int
) -> dict[str, int]:
    """With so many groups of query heads, or, where group is 0, so many query heads a KV head of a given number."""
    memories = times if group else int(cast(int, kv_heads))
    heads = times * (group or memories)
    d_model = heads * width
    mlp = max(8, 8 * round(mlp_ratio * d_model / 8))
    return {"depth": depth, "d_model": d_model, "heads": heads, "kv_heads": memories, "d_k": width, "mlp": mlp}


def _composed(count: Callable[[dict[str, int]], int], shape: Callable[[int], dict[str, int]]) -> Callable[[int], int]:
    return lambda times: count(shape(times))


def _wider(shape: dict[str, int], steps: int) -> dict[str, int]:
    return shape | {"mlp": shape["mlp"] + 8 * (steps - 1)}


def _largest(count: Callable[[int], int], budget: int) -> int:
    """The largest whole number of at least 1 whose count is within the budget; 0 where none is. `count` increases."""
    low, high = 0, 1
    while count(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) <= budget else (low, middle)
    return low


def _require_real(name: str, value: Any, *, above: float, below: float = math.inf, closed: bool = False) -> None:
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real or not (above < value < below or (closed and value == above)):
        bounds = f"{'of at least' if closed else 'above'} {above:g}"
        bounds += f" and below {below:g}" if below < math.inf else ""
        raise UserError(f"{name} must be a number {bounds}, got {value!r:.40}")
