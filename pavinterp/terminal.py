"""What the commands print: a run in a few lines, the table of heads, and JSON that any parser takes."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from pavinterp.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

    from pavinterp.experiments import (
        AssociationBudget,
        Capacity,
        Conditioning,
        ErrorPropagation,
        Explanation,
        HeadImportance,
        HeadRedundancy,
        Needed,
        Swapped,
    )
    from pavinterp.experiments.carriers import Carriers

SHOWN = ("effective_load", "capacity_worst", "capacity_average", "regime", "fidelity", "d_eff")  # fit in 80 columns
WIDEST = 16  # layers of a matrix that is printed
CARRIERS = 8  # heads that are printed
FEW_HEADS = 20  # below it a rank correlation over heads is mostly chance
TEXT_COLUMNS = ("regime",)  # sorted from a to z; every other column from the largest down


def sorted_heads(heads: pd.DataFrame, column: str | None, top: int | None) -> pd.DataFrame:
    """The heads by one column, largest first (labels from a to z; NaN last), and the first `top` of them.

    Raises:
        UserError: no such column.
    """
    if column in ("layer", "head"):
        heads = heads.sort_index(level=column)
    elif column is not None:
        if column not in heads.columns:
            known = [*heads.index.names, *heads.columns]
            near = difflib.get_close_matches(column, known, n=1)
            near += [name for name in known if column in name]  # "load" is in effective_load
            ends = ("_lo", "_hi")
            plain = [name for name in known if not name.endswith(ends)]
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(plain)}"
            raise UserError(f"--sort {column}: no such column; {hint}")
        heads = heads.sort_values(column, ascending=column in TEXT_COLUMNS, kind="stable", na_position="last")
    return heads if top is None else heads.head(top)


def print_heads(heads: pd.DataFrame, also: str | None = None) -> None:
    """The main columns of the heads table (and one more that was asked for), one head a line."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from pavinterp.tables import describe

    columns = [c for c in SHOWN if c in heads.columns]
    if also is not None and also in heads.columns and also not in columns:
        columns.append(also)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name in ("layer", "head", *columns):
        label = name in TEXT_COLUMNS
        title = name if len(name) <= 5 else name.replace("_", "\n")
        table.add_column(title, justify="left" if label else "right", no_wrap=not label, overflow="fold")
    cells = {name: _cells(heads, name) for name in columns}
    for row, (layer, head) in enumerate(heads.index):
        table.add_row(str(layer), str(head), *(cells[name][row] for name in columns))
    # a pipe or a file has no width of its own: give the table the room it needs
    width = None if sys.stdout.isatty() else 40 + 24 * len(columns)
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)
    units = describe()["units"]
    said = "; ".join(f"{name} in {units[name]}" for name in columns if name in units and name not in TEXT_COLUMNS)
    print(f"{said}; in brackets the 95 % interval (those of all columns: --csv, --json)", file=sys.stderr)  # no row


def _cells(heads: pd.DataFrame, name: str) -> list[str]:
    """A column as text; with its interval where it is the load and has one."""
    values = [number(v) for v in heads[name].tolist()]
    if name != "effective_load" or f"{name}_lo" not in heads.columns:
        return values
    low, high = heads[f"{name}_lo"].tolist(), heads[f"{name}_hi"].tolist()
    return [
        v if math.isnan(a) or math.isnan(b) else f"{v} [{number(a)}, {number(b)}]"
        for v, a, b in zip(values, low, high, strict=True)
    ]


def number(value: Any) -> str:
    """Three significant digits for a measured number; counts and labels as they are; – where there is none."""
    if isinstance(value, float):
        if math.isnan(value):
            return "–"
        return f"{value:,.0f}" if 100 <= abs(value) < math.inf else f"{value:#.3g}"
    return "–" if value is None or type(value).__name__ == "NAType" else str(value)


def run_lines(manifest: dict[str, Any], heads: pd.DataFrame) -> list[str]:
    """A run in a few lines: what was measured, how exactly, what came out; why there are no intervals where so."""
    model, corpus, certificate = manifest["model"], manifest["corpus"], manifest["certificate"]
    regimes = heads["regime"].value_counts()
    return [
        f"{model['name']}: {len(heads):,} heads in {len(manifest['layers'])} layers, "
        f"{corpus['sequences']:,} sequences, {corpus['tokens']:,} tokens of {corpus['source']}",
        f"certificate: largest relative residual {certificate['largest']:.1e}, "
        f"tolerance {certificate['tolerance']:.0e}",
        f"median effective load {number(float(heads['effective_load'].median()))}; relative to the linear-memory "
        f"bound: {', '.join(f'{count:,} {name}' for name, count in regimes.items())}",
        *([] if heads["effective_load_lo"].notna().any() else [heads.attrs["intervals"]]),
    ]


def print_models(table: pd.DataFrame) -> None:
    """Models of a sweep, one a line: what became of each, its heads by regime; why those that failed did, to stderr."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = ["model", "revision", "status", "heads", "certificate", "regimes"]
    shown = [name for name in columns if name in table.columns and table[name].notna().any()]
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for name in shown:
        words = name in ("model", "revision", "status", "regimes")
        drawn.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for row in table[shown].itertuples(index=False):
        cells = dict(zip(shown, row, strict=True))
        drawn.add_row(*(_of_model(name, value) for name, value in cells.items()))
    Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False, emoji=False).print(drawn)
    for row in table[table["status"] == "failed"].itertuples():
        print(f"{row.model}: {row.why}", file=sys.stderr)


def _of_model(name: str, value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.1e}" if name == "certificate" else f"{value:,.0f}" if isinstance(value, float) else str(value)


def print_explanation(found: Explanation, by: str) -> None:
    """Which rule explains each head, or the median of each rule by layer; what the figures are goes to stderr."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    if by == "layer":
        rows = found.by_layer()
        titles = ["layer", *rows.columns]
        cells = [[str(layer), *map(share, row)] for layer, *row in rows.itertuples()]
    else:
        titles = ["layer", "head", "linearity", "best_rule", "best_r2", "best_share"]
        cells = [
            [
                *(str(row["layer"]), str(row["head"]), _with_interval(row, "linearity"), share(row["best_rule"])),
                *(_with_interval(row, "best_r2"), share(row["best_share"])),
            ]
            for row in found.heads.reset_index().to_dict("records")
        ]
    for name in titles:
        label = name == "best_rule"
        title = name.replace("_", "\n")
        table.add_column(title, justify="left" if label else "right", no_wrap=not label, overflow="fold")
    for row in cells:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 40 + 24 * len(titles)
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)
    manifest = found.manifest
    compared = int(found.heads["compared"].iloc[0])
    print(
        "R^2 of the response beyond the mean US, gain fitted on one half of the text and judged on the other. "
        f"linearity: that of covariance, the linear term of the head's softmax; best_rule: of {compared} linear-memory "
        "rules (not softmax, which is the head itself, nor hebbian, which is covariance here); best_share: share of "
        "resamples in "
        f"which it is best. {manifest['corpus']['sequences']} sequences of "
        f"{manifest['corpus']['context']} tokens. {manifest['intervals']}",
        file=sys.stderr,
    )


def print_capacity(found: Capacity) -> None:
    """Capacity of each head's memories: one line a head, the theorem first, then what was measured."""
    shown = [
        ("hebbian", "stored", "centred", "trained"),
        ("hebbian", "stored", "isotropic", "trained"),
        ("hebbian", "stored", "centred", "random"),
        ("softmax", "stored", "centred", "trained"),
        ("hebbian", "tests", "centred", "trained"),
        ("softmax", "tests", "centred", "trained"),
    ]
    table: Any = found.memories.xs("euclidean", level="metric")
    rows: dict[Any, Any] = table[["capacity", "capacity_lo", "capacity_hi", "largest"]].to_dict("index")
    there = {key[2:] for key in rows}  # what comes after layer and head
    shown = [(rule, probe, cs, weights) for rule, probe, cs, weights in shown if (probe, rule, cs, weights) in there]
    titles = [" ".join(words).replace(" centred", "").replace(" trained", "") for words in shown]
    print(f"{'layer':>5} {'head':>4} {'N_avg':>6} {'own':>6}" + "".join(f"{title:>26}" for title in titles))
    for head in found.heads.reset_index().to_dict("records"):
        cells = []
        for rule, probe, cs, weights in shown:
            row = rows[head["layer"], head["head"], probe, rule, cs, weights]
            cells.append(_with_interval(row, "capacity", partial(_at_most, row["largest"])))
        bounds = [number(float(head[name])) for name in ("capacity_average", "own_capacity_average")]
        print(
            f"{head['layer']:>5} {head['head']:>4} {bounds[0]:>6} {bounds[1]:>6}"
            + "".join(f"{cell:>26}" for cell in cells)
        )
    print("\nmedian over heads:")
    every = found.memories[["capacity", "largest"]].dropna()
    for key, of_heads in every.groupby(level=["probe", "rule", "cs", "metric", "weights"]):
        words = "{1}, {0}, {2} CSs, {3} metric, {4} weights".format(*cast(Any, key))
        print(f"{_at_most(of_heads['largest'].max(), float(of_heads['capacity'].median())):>7}  {words}")
    print(
        "Associations at which the squared fidelity of memories of the head's own pairs falls to 1/2 (>: not within "
        "the context), probed with stored CSs or with the head's own tests; N_avg: the theorem for isotropic CSs; own: "
        "for the spectrum of the head's CSs; isotropic: random CSs, the head's USs; random: the same architecture with "
        f"random weights. {found.manifest['intervals']}",
        file=sys.stderr,
    )


def _at_most(largest: float, capacity: float) -> str:
    """A capacity, or that it is beyond the largest load that was probed."""
    return f"> {largest:.0f}" if capacity == float("inf") else number(capacity)


def print_needed(found: Needed) -> None:
    """Needed associations of each head beside its load, then how loads and rivals rank the heads."""
    from pavinterp.experiments.rivals import Rivals

    columns = ("needed_20", "needed_10", "needed_5", "needed_2", "effective_load")
    print(f"{'layer':>5} {'head':>4}" + "".join(f"{name:>{26 if name == 'needed_5' else 16}}" for name in columns))
    for row in found.heads.reset_index().to_dict("records"):
        cells = [number(float(row[name])) for name in columns]
        cells[2] = _with_interval(row, "needed_5", number)
        print(
            f"{row['layer']:>5} {row['head']:>4}" + "".join(f"{c:>{26 if i == 2 else 16}}" for i, c in enumerate(cells))
        )
    print("\nrank correlation with needed_5 over heads, and median ratio of needed_5 to the number:")
    for row in found.correlations.reset_index().to_dict("records"):
        shown = [_with_interval(row, what) for what in ("rank_correlation", "ratio")]
        print(f"{row['column']:>24} {shown[0]:>24} {shown[1]:>24}")
    print(
        "; ".join(f"{column.name}: {column.description.rstrip('.')}" for column in Rivals.columns) + ".",
        file=sys.stderr,
    )
    if len(found.heads) < FEW_HEADS:
        print(
            f"A rank correlation over {len(found.heads)} heads says little of other heads: its interval is over the "
            "text alone.",
            file=sys.stderr,
        )
    print(
        "needed_X: associations at which cutting the head's responses to their strongest changes the next-token "
        f"predictions by X % of what mean-ablating it does (KL divergence). {found.manifest['intervals']}",
        file=sys.stderr,
    )


def print_swap(found: Swapped) -> None:
    """Costs of each head and layer and of all, what predicts them, and the loss as more heads are swapped."""
    rules = [name for name in found.total.columns if not name.endswith(("_lo", "_hi"))]
    main = "cost_best" if "cost_best" in rules else rules[0]

    def line(names: str, row: Any) -> str:
        cells = [
            _with_interval(row, name, four_decimals) if name == main else four_decimals(row[name]) for name in rules
        ]
        return names + "".join(f"{c:>{28 if name == main else 17}}" for name, c in zip(rules, cells, strict=True))

    print(
        f"{'layer':>5} {'head':>4}"
        + "".join(f"{name:>{28 if name == main else 17}}" for name in rules)
        + "  effective_load  best_rule"
    )
    for row in found.heads.reset_index().to_dict("records"):
        load, best = number(float(row["effective_load"])), row.get("best_rule", "")
        print(line(f"{row['layer']:>5} {row['head']:>4}", row) + f"{load:>16}  {best}")
    for row in found.layers.reset_index().to_dict("records"):
        print(line(f"{row['layer']:>5}  all", row))
    print(line(f"all {len(found.heads):>6}", found.total.iloc[0]))
    print("\nrank correlation over heads with the cost:")
    only_best = (
        {"best"} if {"best", "covariance", "mean_us"} == {name.removeprefix("cost_") for name in rules} else set()
    )
    for row in found.correlations.drop(index=list(only_best), level="rule").reset_index().to_dict("records"):
        print(f"{row['rule']:>16} {row['predictor']:>28} {_with_interval(row, 'rank_correlation'):>22}")
    if found.curve is not None:
        print("\nrise of the loss with so many heads swapped for their best rule, by order:")
        orders = dict.fromkeys(found.curve.index.get_level_values("order"))
        print(f"{'swapped':>10}" + "".join(f"{order:>28}" for order in orders))
        for swapped in dict.fromkeys(found.curve.index.get_level_values("swapped")):
            rows = [found.curve.loc[(order, swapped)] for order in orders]
            print(
                f"{swapped:>10}" + "".join(f"{_with_interval(row, 'loss_change', four_decimals):>28}" for row in rows)
            )
    loss, text = found.manifest["loss"], found.manifest["corpus"]
    print(
        f"cost: rise of the next-token loss, nats per token, over {share(loss['nats_per_token'])} of the whole model, "
        "where a head (all of a layer, all) responds as a rule: best is the linear rule that fits the head best, "
        "mean_us the mean of what it sees, no association at all; worth: the cost of mean_us. r2: how well the best "
        "rule fits. Orders: cost (cheapest first, found on the other half), load (lightest first), load_descending, "
        "random (mean of eight orders in which every head is early and late alike); "
        f"gains fitted on one half of the text and used on the other; {len(found.heads)} heads, "
        f"{text['sequences']} sequences of {text['context']} tokens. {found.manifest['intervals']}",
        file=sys.stderr,
    )


def print_budget(found: AssociationBudget) -> None:
    """Each head's budget, a layer a line; then what it costs on held-out text, beside other ways to spend as much."""
    print("layer  associations that each head keeps (* all that there are)")
    for layer, rows in found.heads.groupby(level="layer"):
        kept = zip(rows["budget"].tolist(), rows["most"].tolist(), strict=True)
        print(f"{layer:>5}  " + " ".join(f"{budget}{'*' if budget == most else ''}".rjust(5) for budget, most in kept))
    titles = {"mean": "a head", "reads": "read", "loss_increase": "loss increase", "divergence": "divergence"}
    for matched, title in (("loss", "smallest within the limit"), ("total", "as many in all as the budget")):
        print(f"\n{title:<38}{titles['mean']:>8}{titles['reads']:>8}", end="")
        print(f"{titles['loss_increase']:>29}{titles['divergence']:>27}")
        for row in found.methods[found.methods["matched"] == matched].to_dict("records"):
            name = row["method"].replace("_", " ") + (", renormalised" if row["renormalised"] else "")
            name += " (the budget)" if row["chosen"] else ""
            cells = [_with_interval(row, name, four_decimals) for name in ("loss_increase", "divergence")]
            print(f"{name:<38}{row['mean']:>8.1f}{row['reads']:>8.1f}{cells[0]:>29}{cells[1]:>27}")
    limit = found.manifest["arguments"]["max_loss_increase"]
    print(
        f"loss increase (nats per token; limit {limit:g} on the calibration half) and divergence (KL, nats) with all "
        "heads cut at once, on held-out text. read: associations a test of a head really keeps; early tests see fewer "
        "than a budget. Which ones is known only after all were weighed: this bounds attention reads, and the KV cache "
        f"from below. {found.manifest['intervals']}",
        file=sys.stderr,
    )


def print_conditioning(found: Conditioning) -> None:
    """Effect of each paradigm, what conditioning expects and whether it is so, and the theories that say it."""
    layouts = list(found.manifest["layouts"])
    print(f"{'paradigm':<33}{'effect':>22}{'g':>7}{'p':>10}  {'layouts':<9}{'expected':<10}{'verdict':<14}theories")
    rows = found.verdicts.reset_index()
    pooled_of = cast(Any, found.effects.xs("all", level="layout")).to_dict("index")
    for (paradigm, control), mine in rows.groupby(["paradigm", "control"], sort=False):
        first = mine.iloc[0]
        pooled = pooled_of[str(paradigm), str(control)]
        p = pooled["p_holm"] if not math.isnan(pooled["p_holm"]) else None
        held = mine.loc[(mine["verdict"] == "as predicted") & (mine["model"] != "conditioning"), "model"]
        name = paradigm if p is not None else f"  against {control}"
        print(
            f"{name:<33}{_with_interval(pooled, 'effect'):>22}{share(float(pooled['g'])):>7}"
            f"{'' if p is None else f'{p:.2g}':>10}  {first['by_layout']:<9}{first['expected']:<10}"
            f"{first['verdict']:<14}{', '.join(held)}"
        )
    told = rows[rows["verdict"] != "undecided"]
    said = [
        f"{model} {(mine['verdict'] == 'as predicted').sum()} of {len(mine)}"
        for model, mine in told.groupby("model", sort=False)
    ]
    print(f"\nas predicted, of the contrasts that are decided: {', '.join(said) or 'none is decided'}")
    if len(found.halving):
        _print_recall(found)
    if len(found.carriers.heads.columns):
        _print_carriers(found.carriers)
    manifest, given = found.manifest, found.manifest["arguments"]
    print(
        "effect: logit of the US less the mean of its control USs, experimental minus control group in the test, nats, "
        "with its 95 % interval over layouts and draws (paired, both crossed random effects); g: Hedges' g; p: "
        f"corrected for {len(given['paradigms'])} paradigms (Holm). layouts: direction in {', '.join(layouts)} (+, -, "
        f"0 within {number(float(manifest['margin']))} nats, ? undecided). expected: by conditioning; verdict: of "
        f"that; theories, fitted to acquisition only, that predict what was seen. {given['draws']} draws of stimuli. "
        f"{' '.join(manifest['notes'])}",
        file=sys.stderr,
    )


def _print_recall(found: Conditioning) -> None:
    """Recall by number of pairs, and where it halves beside the bounds."""
    print("\nrecall of one pair among many (nats): against USs that were not presented, and that were as often")
    print(f"{'pairs':>6}{'response':>22}{'against_others':>22}")
    for pairs, row in zip(found.recall.index, found.recall.to_dict("records"), strict=True):
        others = "" if math.isnan(row["against_others"]) else _with_interval(row, "against_others")
        print(f"{pairs:>6}{_with_interval(row, 'response'):>22}{others:>22}")
    rows = found.halving.reset_index().to_dict("records")
    said = [f"{row['of']} {_with_interval(row, 'pairs', number)} pairs" for row in rows]
    first = rows[0]
    print(
        f"halved at: {', '.join(said)} (inf: not with {first['most']}); a linear memory of the median head's width: "
        f"N_worst {number(first['capacity_worst'])}, N_avg {number(first['capacity_average'])}"
    )


def _print_carriers(found: Carriers) -> None:
    """Heads that carry acquisition, what they are, and what is left of it without the first of each order."""
    direct = bool(found.heads["us_attribution"].notna().any())
    column = "us_attribution" if direct else "us_strength"
    print("\nheads that carry acquisition:")
    beside = [name for name in ("induction_score", "effective_load") if name in found.beside.columns]
    print(f"{'head':<10}{'us_attribution':>24}{'us_strength':>22}" + "".join(f"{name:>18}" for name in beside))
    first = found.heads.sort_values(column, ascending=False).head(CARRIERS)
    for (layer, head), row in zip(first.index, first.to_dict("records"), strict=True):
        cells = f"{_with_interval(row, 'us_attribution'):>24}{_with_interval(row, 'us_strength'):>22}"
        others = "".join(f"{number(float(found.beside.loc[(layer, head), name])):>18}" for name in beside)
        print(f"{f'L{layer}H{head}':<10}{cells}{others}")
    if len(found.components):
        own = found.components.xs("acquisition", level="paradigm").droplevel("control").reset_index()
        parts = [f"{row['component']} {_with_interval(row, 'attribution')}" for row in own.to_dict("records")]
        print(f"\ndirect parts of acquisition: {', '.join(parts)}")
    print("\nshare of acquisition left where heads respond with their mean:")
    left = found.ablations.xs("acquisition", level="paradigm").reset_index()
    print(f"{'heads':>6}" + "".join(f"{name:>22}" for name in left["order"].unique()))
    for count, mine in left.groupby("count"):
        line = f"{count:>6}"
        for _, sets in mine.groupby("order", sort=False):
            ends = f"{share(float(sets['left'].min()))} to {share(float(sets['left'].max()))}"
            line += f"{_with_interval(sets.iloc[0], 'left') if len(sets) == 1 else ends:>22}"
        print(line)
    kinds = found.kinds.reset_index()
    rows = kinds[kinds["of"] == column].to_dict("records")
    said = [f"{row['beside']} {_with_interval(row, 'rank_correlation')}" for row in rows]
    print(f"\nrank correlation of {column} over heads: {', '.join(said)}")


def print_propagation(found: ErrorPropagation) -> None:
    """Layers with what becomes of their errors, the gains between layers, calibration, and all layers at once."""
    columns = ("infidelity", "infidelity_theorem", "own_change", "gain", "end_gain", "linear_to")
    width = {"own_change": 29, "gain": 24, "end_gain": 24}
    print(f"{'layer':>5}" + "".join(f"{name:>{width.get(name, 20)}}" for name in columns))
    for row in found.layers.reset_index().to_dict("records"):
        cells = [number(float(row[name])) for name in columns[:2]]
        cells += [_with_interval(row, name, number) for name in columns[2:-1]]
        cells.append(f"{row['linear_to']:g}")
        print(f"{row['layer']:>5}" + "".join(f"{c:>{width.get(n, 20)}}" for n, c in zip(columns, cells, strict=True)))
    smallest = found.gain.index.get_level_values("strength").min()
    gains = found.gain.loc[("interference", smallest), "gain"].unstack("to")
    if len(gains.columns) <= WIDEST:
        print("\ngain of a change after a layer's block (row) to that after a later block (column):")
        print(f"{'layer':>5}" + "".join(f"{to:>7}" for to in gains.columns))
        for layer, row in gains.iterrows():
            print(f"{layer:>5}" + "".join(" " * 7 if math.isnan(v) else f"{v:>7.2f}" for v in row))
    print("\ninfidelity of heads as predicted from their load, over heads:")
    print(f"{'prediction':>12}" + "".join(f"{n:>24}" for n in ("rank_correlation", "error", "bias", "slope")))
    for row in found.calibration.reset_index().to_dict("records"):
        cells = [_with_interval(row, name) for name in ("rank_correlation", "error", "bias", "slope")]
        print(f"{row['prediction']:>12}" + "".join(f"{cell:>24}" for cell in cells))
    print("\nall layers at once, over the root of the sum of squares of single ones (1: errors add independently):")
    print(f"{'kind':>12} {'strength':>8}{'change_ratio':>24}{'divergence_ratio':>24}{'divergence':>32}")
    for row in found.joint.reset_index().to_dict("records"):
        cells = [_with_interval(row, name) for name in ("change_ratio", "divergence_ratio")]
        cells.append(_with_interval(row, "divergence", four_decimals))
        print(f"{row['kind']:>12} {row['strength']:>8g}{cells[0]:>24}{cells[1]:>24}{cells[2]:>32}")
    off = found.witness["difference"].abs().max()
    said = found.manifest["first_order"]
    if not math.isnan(off):
        said += f": final changes at strength {smallest:g} differ from them by {100 * off:.2g} % at most"
    print(
        "infidelity: 1 - f^2, the share of a response's power that is not its target's US, mean over the layer's "
        "heads; theorem: as f^2(N) predicts it from the effective load. own_change: relative change of the residual "
        f"stream after the layer's block when its own interference, {smallest:g} times the norm of what its attention "
        "writes, is added; gain: change after the last block over that; end_gain: KL of next-token predictions over "
        "its square (nats); linear_to: strength up to which the last block's change stays within 10 % of proportional. "
        f"isotropic: noise of equal norm. {said}. {found.manifest['intervals']}",
        file=sys.stderr,
    )


def print_prune(found: HeadImportance) -> None:
    """How well each score ranks heads by what ablating them does; then the loss by number of heads removed."""
    print(f"{'rank correlation with':<26} {'loss change':>24} {'divergence':>24}")
    for name, rows in found.predictors.groupby(level="predictor", sort=False):
        by_outcome = rows.droplevel("predictor").to_dict("index")
        cells = [_with_interval(by_outcome[outcome], "rank_correlation") for outcome in ("loss_change", "divergence")]
        print(f"{name:<26} {cells[0]:>24} {cells[1]:>24}")
    print(f"\n{'loss change without':<26}" + f"{'heads':>6} {'nats per token':>31} {'below random order':>31}")
    for row in found.curve.reset_index().to_dict("records"):
        if row["removed"]:
            cells = [_with_interval(row, column, four_decimals) for column in ("loss_change", "below_random")]
            print(f"{row['order']:<26}{row['removed']:>6} {cells[0]:>31} {cells[1]:>31}")
    if found.manifest["gradient"].startswith("none"):
        print(f"\ngradient: {found.manifest['gradient']}")


def print_redundancy(found: HeadRedundancy) -> None:
    """Each layer's distinct heads and clusters; what ablating clusters does beside random groups; what predicts it."""
    print(f"{'layer':>5} {'heads':>5} {'distinct heads':>22} {'mean CKA':>20} {'W_O overlap (random)':>21}  clusters")
    for row in found.layers.reset_index().to_dict("records"):
        cells = [_with_interval(row, name) for name in ("distinct", "similarity")]
        images = f"{share(row['overlap'])} ({share(row['overlap_expected'])})"
        named = f"{row['clusters']} (CKA {share(row['cut'])})" if row["clusters"] else ""
        print(f"{row['layer']:>5} {row['heads']:>5} {cells[0]:>22} {cells[1]:>20} {images:>21}  {named}")
    total = found.total.iloc[0]
    print(f"  all {total['heads']:>5.0f} {_with_interval(total, 'distinct'):>22}")
    clusters = found.groups[found.groups["kind"] == "cluster"] if len(found.groups) else found.groups
    if len(clusters):
        print(f"\n{'cluster':<28}{'CKA':>6}{'alignment':>11}  {'ablation':<10} {'loss change':>29} {'loss index':>29}")
    for row in clusters.to_dict("records"):
        cells = [_with_interval(row, name, four_decimals) for name in ("loss_change", "loss_index")]
        print(
            f"{row['name']:<28}{share(row['cka']):>6}{share(row['alignment']):>11}  {row['ablation']:<10} "
            f"{cells[0]:>29} {cells[1]:>29}"
        )
    control = found.control[found.control["clusters"] > 0].reset_index()
    if len(control):
        print("\nindex per pair of heads, clusters against random groups of their size and layer:")
    for row in control.to_dict("records"):
        cells = [_with_interval(row, name, four_decimals) for name in ("cluster_index", "control_index", "difference")]
        print(
            f"{row['ablation']:>10} {row['outcome']:>16}: {row['clusters']} clusters {cells[0]}, random {cells[1]}, "
            f"difference {cells[2]}"
        )
    if len(found.correlations):
        print("\nrank correlation over pairs with the redundancy index:")
        names = list(dict.fromkeys(found.correlations.index.get_level_values("predictor")))
        print(f"{'pairs':>14} {'ablation':>10} {'index of':>16}" + "".join(f"{name:>22}" for name in names))
        for key, rows in found.correlations.groupby(level=["over", "ablation", "outcome"], sort=False):
            over, ablation, outcome = cast(Any, key)
            cells = [_with_interval(row, "rank_correlation") for row in rows.to_dict("records")]
            print(
                f"{over:>14} {ablation:>10} {outcome.removesuffix('_index'):>16}"
                + "".join(f"{cell:>22}" for cell in cells)
            )
    text = found.manifest["corpus"]
    print(
        "CKA: linear, unbiased over positions of different documents, of what heads write to the residual stream; "
        "distinct heads: participation ratio of its eigenvalues. index: effect of ablating a group less the sum of its "
        "heads' single effects; loss in nats per token, divergence KL in nats; interaction: the divergence's index "
        "over twice the root of the two single divergences. alignment: whether two heads write the same vector; "
        f"overlap: of the images of W_O. {len(found.heads)} heads, {text['sequences']} sequences of {text['context']} "
        f"tokens. {found.manifest['intervals']}",
        file=sys.stderr,
    )


def share(value: Any) -> str:
    """An R^2 or a share with two decimals; a label as it is."""
    return f"{value:.2f}" if isinstance(value, float) and math.isfinite(value) else number(value)


def four_decimals(value: float) -> str:
    """A loss or divergence in nats."""
    return f"{value:.4f}" if math.isfinite(value) else number(value)


def _with_interval(row: Any, name: str, shown: Callable[[float], str] = share) -> str:
    """`0.86 [0.81, 0.91]`, the number alone where there is no interval."""
    value, low, high = (float(row[f"{name}{end}"]) for end in ("", "_lo", "_hi"))
    return shown(value) + ("" if math.isnan(low) else f" [{shown(low)}, {shown(high)}]")


def print_verification(result: dict[str, Any]) -> None:
    """Whether a model can be measured, then one line a layer."""
    answer = "can be measured" if result["passed"] else "cannot be measured exactly"
    future = "later tokens change nothing earlier" if result["future_safe"] else "LATER TOKENS CHANGE EARLIER POSITIONS"
    print(f"{result['model']} ({result['architecture']}, {result['dtype']}): {answer}, by {result['path']}")
    print(f"largest relative residual {result['largest']:.1e}, tolerance {result['tolerance']:.0e}; {future}")
    agreement, limit = result["agreement"], result["agreement_tolerance"]
    apart = f"{result['batch_change']:.1e} (tolerance {limit:.0e})"
    print(f"loads of sequences read one by one differ from those of a batch, relatively, by {apart}")
    if agreement is None:
        print(f"no second path: {result['no_other_path']}")
    else:
        print(f"loads by the other path, transformer_lens, differ by {agreement:.1e} (tolerance {limit:.0e})")
    padding = ", ".join(f"{side} {change:.1e}" for side, change in result["padding_change"].items())
    print(
        f"positions: {result['positions']}; padding (never used here) would change final hidden states by: "
        f"{padding or 'not told'}"
    )
    if result["skipped"]:
        print(f"without attention, not measured: layers {', '.join(map(str, result['skipped']))}")
    head = ("layer", "heads", "kv_heads", "d_k", "d_v", "window", "softcap", "sinks", "between", "residual")
    print("".join(f"{name:>10}" for name in head))
    for row in result["layers"]:
        residual = f"{row['residual']:.1e}" + ("" if row["residual"] <= result["tolerance"] else " !")
        shown = row | {"sinks": "learned" if row["sinks"] else None}
        print("".join(f"{number(shown[name]):>10}" for name in head[:-1]) + f"{residual:>10}")
    print(
        "residual: largest difference between a head's rebuilt responses and the model's, over the size of the latter; "
        "between: what changes responses before W_O; sinks: learned sink logits; – none",
        file=sys.stderr,
    )


def print_json(value: Any) -> None:
    """One JSON object and nothing else on standard output."""
    print(json.dumps(json_safe(value), indent=2, ensure_ascii=False, allow_nan=False))


def json_safe(value: Any) -> Any:
    """The same with plain types: missing numbers become null, infinities the strings "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [json_safe(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if type(value).__name__ == "NAType":
        return None
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors, pandas columns
        return json_safe(value.tolist())
    if hasattr(value, "to_dict"):
        return json_safe(value.reset_index().to_dict("records"))
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
