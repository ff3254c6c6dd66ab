"""explain(): which learning rule explains what each head responds, and how much of it is linear in the scores."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pavinterp.arguments import require_yes_or_no
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment, definitions
from pavinterp.experiments.all_rules import all_rules
from pavinterp.experiments.association_terms import SumsOfSquares, Variant, variants
from pavinterp.experiments.cross_fitting import Judged, cross_fit, halves
from pavinterp.manifest import describe_experiment
from pavinterp.models import ModelHandle
from pavinterp.reading import Progress, certified_records, check_arguments, reading
from pavinterp.tables import DRAWS, FEWEST_CLUSTERS, LEVEL, clusters_of, interval_words

SEQUENCES = 32
TESTS = 32

COLUMNS = {
    "rule": ("index", "Learning rule (pavinterp.theory.rules); softmax is the head itself, R^2 = 1 by construction."),
    "cs": (
        "index",
        "CSs as the rule takes them: centred by the mean CS of the sequence, raw, or either where the rule does not "
        "see the difference. A constant added to every CS changes nothing that the head does, but changes raw figures: "
        "they are of its parametrisation.",
    ),
    "r2": (
        "share",
        "R^2 = 1 - sum w ||y - g x||^2 / sum w ||y||^2 over tests, y the head's association term, x the rule's, g one "
        "gain: fitted on one half of the text, judged on the other, halves swapped, both pooled. 1 explains all of the "
        "response beyond the mean US, 0 nothing; below 0 the gain did not carry over to the other half. Tests with "
        "larger responses weigh more.",
    ),
    "gain_a": ("ratio", "Gain g fitted on half a of the text (and judged on half b)."),
    "gain_b": ("ratio", "Gain g fitted on half b of the text (and judged on half a)."),
    "parameter": (
        "label",
        "Parameters of the rule, chosen on the half that the gain is fitted on; as a | b where the choices differ.",
    ),
    "linearity": ("share", "r2 of covariance: what the linear term of the head's own softmax explains."),
    "best_rule": (
        "label",
        "The linear-memory rule with the largest r2, CSs centred: any but softmax, and but hebbian, which equals "
        "covariance here.",
    ),
    "best_r2": ("share", "Its r2. The largest of `compared`, chosen on the data that judge it: slightly too high."),
    "best_share": ("share", "Share of bootstrap draws in which the same rule is best; near 1 the choice is clear."),
    "compared": ("count", "Rules that best_rule was chosen from."),
    "sequences": ("count", "Sequences the head was read on."),
    "clusters": ("count", "Units that are halved and resampled: documents, or sequences where there is one document."),
}
"""Units and definition of every column of an Explanation; `_lo` and `_hi` are the 95 % interval."""


@dataclass(repr=False)
class Explanation:
    """What `explain` found.

    Attributes:
        rules: one row per (layer, head, rule, cs): r2 with interval, gain_a, gain_b, parameter.
        heads: one row per (layer, head): linearity and best_r2 with intervals, best_rule, best_share, compared,
            sequences, clusters.
        manifest: how it came about.

    Both tables carry "units", "descriptions" and "intervals" (how those were made, or why there are none) in `.attrs`.
    """

    rules: pd.DataFrame
    heads: pd.DataFrame
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"Explanation({model['name']}: {len(self.heads)} heads, {text['sequences']} sequences of "
            f"{text['context']} tokens; .heads, .rules, .by_layer(), .manifest)"
        )

    def experiment(self) -> Experiment:
        """What a run keeps of it: how linear each head is, its best rule, and every rule's figures."""
        columns = [f"{name}{end}" for name in ("linearity", "best_r2") for end in ("", "_lo", "_hi")]
        numbers = self.heads[[*columns, "best_rule"]].copy()
        numbers.attrs = definitions({name: COLUMNS[name] for name in ("linearity", "best_r2", "best_rule")})
        return Experiment("rules", numbers, {"rules": self.rules}, self.manifest)

    def flat(self) -> pd.DataFrame:
        """Both tables as one: the rows of `rules`, the columns of `heads` beside them."""
        return self.rules.join(self.heads)

    def by_layer(self) -> pd.DataFrame:
        """Median over a layer's heads of each rule's r2 (centred CSs), and the rule that is best in most of them."""
        mine = self.rules["r2"].drop("raw", level="cs", errors="ignore").droplevel("cs")
        table = mine.groupby(["layer", "rule"]).median().unstack("rule")
        table = table[[name for name in self.manifest["arguments"]["rules"] if name in table.columns]]
        best = self.heads["best_rule"].groupby("layer").agg(lambda names: _most_often([*names.dropna()]))
        return table.rename_axis(columns=None).assign(best_rule=best)


def explain(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    tests: int | None = TESTS,
    layers: list[int] | None = None,
    rules: Collection[str] | None = None,
    seed: int = 0,
    batch: int | None = None,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Explanation:
    """Which learning rule explains each head of a model (theory section 4, first question).

    For test `t` let `v_bar_t` be the mean of the USs it sees. The head's association term is what it responds beyond
    that baseline, in residual-stream coordinates: `y_t = (o_t - v_bar_t) R` (with the gate where the model has one;
    with a learned sink `v_bar_t` counts by the strength that is left to the USs). A rule's is its response to the same
    USs centred alike, `x_t = (r_t(v) - r_t(1) v_bar_t) R`, `r_t(1)` being its response to a US that is 1 everywhere.
    Sums over pairs (hebbian, decay) are divided by the number of pairs or their weight, so that one gain serves all
    positions. Oja's rule is not linear in the USs: it gets them in residual-stream coordinates, centred by the mean of
    the sequence. About the mean US, hebbian and covariance are one rule (to centre one side of a covariance is to
    centre both), so that their figures are the same and only one of them is compared. CSs are centred by the mean CS
    of the whole sequence (later ones too: a constant, the same for all tests), and, as a second variant that is never
    called the best, not at all.

    The prediction is `g x_t`, one gain per head and rule, `g = sum w x.y / sum w x.x` over one half of the documents
    (sequences where there is one document; a seeded random half); rates and decays are chosen there too, from the
    small grids of `association_terms.GRIDS`. The other half judges: `R^2 = 1 - sum w ||y - g x||^2 / sum w ||y||^2`.
    Halves are swapped and the sums pooled. Intervals: 95 % percentile bootstrap over the same clusters, refitting gain
    and parameters in every draw, the halves as they are; none under 8 clusters.

    Rules learn what test `t` sees and no more, in windows and chunks too. They get queries times the head's own scale;
    soft-caps, biases of the scores (ALiBi) and sinks are parts of the head that they lack, so what those do counts
    against them. Only `softmax` has them: it is the head itself, there as a check of the whole path (R^2 = 1, gain 1).

    Args:
        model, corpus, layers, seed, batch, bos, capture, progress, command: as for `pavinterp.measure`.
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: how many; default 32, or as many as the text has.
        tests: positions tested a sequence; None tests all.
        rules: names of `pavinterp.theory.rules.RULES`; default all. `pseudoinverse` takes half of the time, and more
            where CSs are wide.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.

    Raises:
        UserError: the model or text cannot be measured, the certificate fails, or there is no second half to judge on.
    """
    started = time.monotonic()
    layers, seed = check_arguments(tests, layers, seed, batch, bos, progress)
    require_yes_or_no("resume", resume)
    names = choose_rules(rules)
    measure = SumsOfSquares(variants(names))
    own = {"tests": "all" if tests is None else tests, "rules": names, "seed": seed, "bos": bos, "capture": capture}
    with (
        reading(
            model,
            corpus,
            context=context,
            sequences=sequences,
            usual_sequences=SEQUENCES,
            layers=layers,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
        ) as read,
        read.pieces("rules", read.arguments(**own), resume) as pieces,
    ):
        records, residuals = certified_records(
            read.handle,
            read.text,
            [measure],
            layers=read.layers,
            tests=tests,
            batch=batch,
            seed=seed,
            dtype=torch.float64,
            stage=read.stage,
            what="text sequences",
            pieces=pieces,
        )
    table, heads = tables(records, measure.of, seed)
    note = heads.attrs["intervals"]
    manifest = describe_experiment(read.handle, read.shapes, read.text, read.arguments(**own), residuals, note, command)
    manifest["wall_seconds"] = round(time.monotonic() - started, 1)
    return Explanation(table, heads, manifest)


def choose_rules(rules: Collection[str] | None) -> list[str]:
    """The rules by name, in the order of `all_rules`; None is all.

    Raises:
        UserError: a name that is none, or no names.
    """
    if rules is None:
        return list(all_rules())
    if isinstance(rules, str) or not isinstance(rules, Collection):
        raise UserError(f"rules must be a list of names or None (all), got {rules!r:.40}")
    wrong = [name for name in rules if name not in all_rules()]
    if wrong or not rules:
        raise UserError(f"rules {wrong or list(rules)}: choose among {', '.join(all_rules())}")
    return [name for name in all_rules() if name in rules]


def tables(records: pd.DataFrame, of: list[Variant], seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """From the sums of each sequence to one row per head x rule x cs, and one row per head (see COLUMNS).

    Raises:
        UserError: one cluster alone, which cannot be halved.
    """
    unit, cluster = clusters_of(records)
    codes, labels = pd.factorize(cluster, sort=True)
    if len(labels) < 2:
        raise UserError(
            "one sequence has no second half to judge on: give more text, several documents, or a shorter context"
        )
    heads = pd.MultiIndex.from_frame(records[["layer", "head"]].astype(int)).unique().sort_values()
    place = heads.get_indexer(pd.MultiIndex.from_frame(records[["layer", "head"]].astype(int)))

    def by_cluster(names: list[str]) -> np.ndarray:
        total = np.zeros((len(labels), len(heads), len(names)))
        np.add.at(total, (codes, place), records[names].to_numpy(np.float64))
        return total

    once = np.ones(len(labels))
    drawn = None
    if len(labels) >= FEWEST_CLUSTERS:
        rng = np.random.default_rng(seed)
        drawn = rng.multinomial(len(labels), np.full(len(labels), 1 / len(labels)), size=DRAWS).astype(np.float64)
    in_a, yy = halves(len(labels), seed), by_cluster(["yy"])[..., 0]
    rows, estimates, draws = [], dict[tuple[str, str], np.ndarray](), dict[tuple[str, str], np.ndarray]()
    for key in dict.fromkeys((variant.rule, variant.cs) for variant in of):
        mine = [variant for variant in of if (variant.rule, variant.cs) == key]
        xy, xx = (by_cluster([variant.columns[i] for variant in mine]) for i in (0, 1))
        judged = cross_fit(xy, xx, yy, in_a, once)
        estimates[key] = judged.r2
        if drawn is not None:
            draws[key] = cross_fit(xy, xx, yy, in_a, drawn).r2
        rows.append(_row(heads, key, judged, draws.get(key), mine))
    words = interval_words(unit, len(labels))
    table = pd.concat(rows).sort_index(level=["layer", "head"], sort_remaining=False, kind="stable")
    table = _with_text(table, words)
    per_head = _heads(heads, estimates, draws)
    per_head["sequences"], per_head["clusters"] = records["sequence"].nunique(), len(labels)
    return table, _with_text(per_head, words)


def _row(
    heads: pd.MultiIndex, key: tuple[str, str], judged: Judged, draws: np.ndarray | None, mine: list[Variant]
) -> pd.DataFrame:
    words = np.array([variant.words for variant in mine], dtype=object)
    a, b = words[judged.chosen[0]], words[judged.chosen[1]]
    index = pd.MultiIndex.from_tuples([(*head, *key) for head in heads], names=["layer", "head", "rule", "cs"])
    columns = {
        **_estimate("r2", judged.r2, draws),
        "gain_a": judged.gains[0],
        "gain_b": judged.gains[1],
        "parameter": np.where(a == b, a, a + " | " + b),
    }
    return pd.DataFrame(columns, index=index)


def _heads(
    heads: pd.MultiIndex, estimates: dict[tuple[str, str], np.ndarray], draws: dict[tuple[str, str], np.ndarray]
) -> pd.DataFrame:
    """Linearity and the best linear-memory rule of each head."""
    linear = ("covariance", "either")
    missing = np.full(len(heads), np.nan)
    columns: dict[str, Any] = _estimate("linearity", estimates.get(linear, missing), draws.get(linear))
    left_out = ["softmax", "hebbian"] if linear in estimates else ["softmax"]
    keys = [key for key in estimates if key[0] not in left_out and key[1] != "raw"]
    if keys:
        r2 = np.stack([estimates[key] for key in keys])
        best = np.where(np.isnan(r2), -np.inf, r2).argmax(0)
        silent = np.isnan(r2).all(0)
        every = np.arange(len(heads))
        drawn, share = None, missing
        if draws:
            all_drawn = np.stack([draws[key] for key in keys])  # [rules, draws, heads]
            drawn = all_drawn[best, :, every].T
            there = ~np.isnan(all_drawn).all(0)
            winner = np.where(np.isnan(all_drawn), -np.inf, all_drawn).argmax(0)
            with np.errstate(invalid="ignore"):
                share = ((winner == best) & there).sum(0) / there.sum(0)
        columns["best_rule"] = np.where(silent, None, np.array([key[0] for key in keys], dtype=object)[best])
        columns |= _estimate("best_r2", r2[best, every], drawn)
        columns["best_share"] = share
    else:
        columns |= {"best_rule": None, **_estimate("best_r2", missing, None), "best_share": missing}
    columns["compared"] = np.int64(len(keys))
    return pd.DataFrame(columns, index=heads)


def _estimate(name: str, values: np.ndarray, draws: np.ndarray | None) -> dict[str, np.ndarray]:
    """An estimate with its percentile interval; draws that lack a half do not count."""
    low = high = np.full(len(values), np.nan)
    if draws is not None:
        tail = 100 * (1 - LEVEL) / 2
        here = ~np.isnan(draws).all(0) & ~np.isnan(values)
        low, high = low.copy(), high.copy()
        low[here] = np.nanpercentile(draws[:, here], tail, axis=0, method="lower")
        high[here] = np.nanpercentile(draws[:, here], 100 - tail, axis=0, method="higher")
    return {name: values, f"{name}_lo": low, f"{name}_hi": high}


def _with_text(table: pd.DataFrame, intervals: str) -> pd.DataFrame:
    known = {name: text for name, text in COLUMNS.items() if name in table.columns or name in table.index.names}
    table.attrs = definitions(known) | {"intervals": intervals}
    return table


def _most_often(names: list[str]) -> str:
    """The name that is there most often (the first of those in a tie), with how often."""
    if not names:
        return ""
    most = max(dict.fromkeys(names), key=names.count)
    return f"{most} ({names.count(most)} of {len(names)})"
