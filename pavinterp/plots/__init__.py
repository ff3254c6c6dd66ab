"""Pictures for notebooks: one function a picture; each takes DataFrames, draws with matplotlib and returns the Axes.

`heads` is `run.heads()`, a `row` one of its rows (`heads.loc[(3, 5)]`), `tests` is `run.details.tests` and `spectra`
is `run.details.spectra`; where they hold many heads, the row's are picked out. Tables of experiments are named in each
function. Reports draw the same pictures as SVG.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

__all__ = [
    "acquisition_curve",
    "conditioning_ablation",
    "distinct_heads",
    "end_gains",
    "fidelity_load",
    "gain_map",
    "head_kinds",
    "head_load",
    "infidelity_calibration",
    "load_by_depth",
    "load_distribution",
    "load_map",
    "load_position",
    "load_ranking",
    "paradigm_effects",
    "recall_curve",
    "redundancy_of_pairs",
    "spectrum",
]


def load_map(heads: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effective load over the worst-case bound, layers across and heads down, on a logarithmic colour scale.

    The frame inside a cell tells its regime: none is error-free, thin is graded, thick is beyond, dotted lies across
    two of them. A value above 1 is a load above what a linear memory recalls without error in the worst case.
    """
    from pavinterp.plots import across_heads, on_axes

    return on_axes.draw(across_heads.load_map(heads), ax)


def load_ranking(heads: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effective load (associations) of every head with its interval, in rising order, against N_worst and N_avg."""
    from pavinterp.plots import across_heads, on_axes

    return on_axes.draw(across_heads.load_ranking(heads), ax)


def load_by_depth(heads: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effective load (associations) of every head by layer, the median of each layer, and both bounds."""
    from pavinterp.plots import across_heads, on_axes

    return on_axes.draw(across_heads.load_by_depth(heads), ax)


def head_load(row: pd.Series, ax: Axes | None = None) -> Axes:
    """One head's load with its interval beside N_worst and N_avg, for isotropic CSs and for the head's own."""
    from pavinterp.plots import on_axes, one_head

    return on_axes.draw(one_head.head_load(row), ax)


def load_distribution(tests: pd.DataFrame, row: pd.Series, ax: Axes | None = None) -> Axes:
    """Distribution of one head's load over positions (tests weighted by their inverse inclusion probability)."""
    from pavinterp.plots import on_axes, one_head

    return on_axes.draw(one_head.load_distribution(tests, row), ax)


def load_position(tests: pd.DataFrame, row: pd.Series, ax: Axes | None = None) -> Axes:
    """One head's load against position, both logarithmic, with the fit `load_growth`, `load_intercept` and horizons."""
    from pavinterp.plots import on_axes, one_head

    return on_axes.draw(one_head.load_position(tests, row), ax)


def fidelity_load(tests: pd.DataFrame, row: pd.Series, ax: Axes | None = None) -> Axes:
    """One head's squared fidelity against load, with `f^2(N) = 1 / (1 + (N - 1) / d_eff)` of a linear memory."""
    from pavinterp.plots import on_axes, one_head

    return on_axes.draw(one_head.fidelity_load(tests, row), ax)


def spectrum(spectra: pd.DataFrame, row: pd.Series, ax: Axes | None = None) -> Axes:
    """Eigenvalues of the second-moment matrix of one KV head's unit, centred CSs (they sum to 1), and its `d_eff`."""
    from pavinterp.plots import on_axes, one_head

    return on_axes.draw(one_head.spectrum(spectra, row), ax)


def head_kinds(row: pd.Series, ax: Axes | None = None) -> Axes:
    """One head's previous-token, induction and duplicate-token scores on repeated random tokens, with intervals."""
    from pavinterp.plots import on_axes, one_head

    return on_axes.draw(one_head.head_kinds(row), ax)


def infidelity_calibration(heads: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Infidelity `1 - f^2` of every head, measured against predicted; `heads` is `ErrorPropagation.heads`."""
    from pavinterp.plots import on_axes, propagation

    return on_axes.draw(propagation.infidelity_calibration(heads), ax)


def gain_map(gain: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Gain of an error of one layer in the stream after a later one; `gain` is `ErrorPropagation.gain`."""
    from pavinterp.plots import on_axes, propagation

    return on_axes.draw(propagation.gain_map(gain), ax)


def end_gains(ends: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """KL (nats) over squared relative change of the stream, by layer; `ends` is `ErrorPropagation.ends`."""
    from pavinterp.plots import on_axes, propagation

    return on_axes.draw(propagation.end_gains(ends), ax)


def distinct_heads(layers: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effective number of distinct heads by layer; `layers` is `HeadRedundancy.layers`."""
    from pavinterp.plots import on_axes, redundancy

    return on_axes.draw(redundancy.distinct_heads(layers), ax)


def redundancy_of_pairs(pairs: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Interaction of ablating two heads against alignment of their writes; `pairs` is `HeadRedundancy.pairs`."""
    from pavinterp.plots import on_axes, redundancy

    return on_axes.draw(redundancy.redundancy_of_pairs(pairs), ax)


def acquisition_curve(acquisition: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Acquisition and the theories fitted to it (nats); `acquisition` is `Conditioning.acquisition`."""
    from pavinterp.plots import conditioning, on_axes

    return on_axes.draw(conditioning.acquisition_curve(acquisition), ax)


def paradigm_effects(verdicts: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Effect of every paradigm, observed and predicted (nats); `verdicts` is `Conditioning.verdicts`."""
    from pavinterp.plots import conditioning, on_axes

    return on_axes.draw(conditioning.paradigm_effects(verdicts), ax)


def conditioning_ablation(ablations: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Share of acquisition left without some heads; `ablations` is `Conditioning.carriers.ablations`."""
    from pavinterp.plots import conditioning, on_axes

    return on_axes.draw(conditioning.conditioning_ablation(ablations), ax)


def recall_curve(recall: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Recall of one pair (nats) against the number of pairs in the prompt; `recall` is `Conditioning.recall`."""
    from pavinterp.plots import conditioning, on_axes

    return on_axes.draw(conditioning.recall_curve(recall), ax)
