# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How many associations does a memory hold? The capacity theorem by simulation
#
# A linear memory of `N` pairs of a conditional stimulus (CS, unit vectors here) and an unconditional stimulus (US),
# `S = sum_j k_j v_j^T`, answers the stored CS `k_i` with `v_i` plus crosstalk from every other pair. The theorem says
# how many pairs fit: of order `sqrt(d_k)` if crosstalk must stay harmless even when it is all aligned against the
# stored US, of order `d_k` if it may be as strong as the signal. Everything below needs no model, only random numbers,
# and runs in about a minute on two cores.
#
# Intervals are 95 % bootstrap intervals over trials; a trial is a memory drawn afresh.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import torch
from scipy.special import gammaln, ive

from pavinterp.plots.look import LIGHT
from pavinterp.theory.capacity import (
    average_case_capacity,
    expected_squared_fidelity,
    isotropic_average_case_capacity,
    isotropic_worst_case_capacity,
    worst_case_capacity,
)
from pavinterp.theory.decoding import decoding_capacity, decoding_success
from pavinterp.theory.gram import cosines, pair_means
from pavinterp.theory.rules import RULES

rng = np.random.default_rng(0)
torch.manual_seed(0)
sns.set_theme(style="ticks", palette="colorblind", rc={"axes.spines.top": False, "axes.spines.right": False})


def bootstrap(statistic, *trials, draws=1000):
    """The statistic of all trials, and its 95 % interval; several sets of trials are drawn independently."""
    resampled = [statistic(*(t[rng.integers(len(t), size=len(t))] for t in trials)) for _ in range(draws)]
    return np.array([statistic(*trials), *np.percentile(resampled, [2.5, 97.5], axis=0)])


def crossing(level, curve, loads):
    """The load at which a monotone curve crosses a level, log-linear between loads; NaN if it does not."""
    sign = 1 if curve[-1] > curve[0] else -1
    found = np.interp(sign * level, sign * curve, np.log(loads), left=np.nan, right=np.nan)
    return np.exp(found)


def written(estimate, digits=3):
    return "{:.{d}g} [{:.{d}g}, {:.{d}g}]".format(*estimate, d=digits)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


# %% [markdown]
# ## The two bounds for isotropic CSs
#
# In each trial a probe meets more and more other CSs. `N_worst` is where the mean of its summed `|cos|` passes 1/2,
# `N_avg` where the mean of its summed `cos^2` passes 1. Neither uses the closed forms it is compared with.


# %%
def crosstalk(draw, others, trials):
    """Summed |cos| and cos^2 of a probe with 0, 1, 2 ... other CSs, one row a trial. `draw(n)` gives n unit CSs."""
    cos = np.stack([(keys := draw(others + 1))[1:] @ keys[0] for _ in range(trials)])
    return [np.pad(x.cumsum(1), ((0, 0), (1, 0))) for x in (np.abs(cos), cos**2)]


def capacity_of(level, trials):
    curve = trials.mean(0)
    return np.interp(level, curve, 1.0 + np.arange(len(curve)), right=np.nan)


dimensions = np.array([16, 32, 64, 128, 256, 512])
absolute, square = zip(
    *(crosstalk(lambda n, d=d: unit(rng.normal(size=(n, d))), int(1.4 * d) + 10, 300) for d in dimensions), strict=True
)
worst = np.array([bootstrap(lambda x: capacity_of(0.5, x), x) for x in absolute])
average = np.array([bootstrap(lambda x: capacity_of(1.0, x), x) for x in square])
theorem = pd.DataFrame(
    {
        "N_worst, simulated": [written(x) for x in worst],
        "closed form": isotropic_worst_case_capacity(dimensions.astype(float)).round(2),
        "N_avg, simulated": [written(x) for x in average],
        "closed form ": isotropic_average_case_capacity(dimensions.astype(float)).round(0).astype(int),
    },
    index=pd.Index(dimensions, name="d_k"),
)
print(theorem.to_string())

# %% [markdown]
# The exponents. One pair always fits, so the power law is one of `N - 1`, the number of *other* pairs; a fit to `N`
# itself comes out too flat for `N_worst`, where the one is not small beside the rest.


# %%
def slope(level, offset, trials):
    capacities = np.array([capacity_of(level, x) for x in trials])
    return np.polyfit(np.log(dimensions), np.log(capacities - offset), 1)[0]


slopes = {
    (name, "N - 1" if offset else "N"): bootstrap(lambda *t, le=level, o=offset: slope(le, o, t), *trials, draws=300)
    for name, level, trials in (("N_worst", 0.5, absolute), ("N_avg", 1.0, square))
    for offset in (1, 0)
}
for (name, of), estimate in slopes.items():
    print(f"slope of log({of}) on log(d_k), {name}: {written(estimate, 4)}")

# %%
fig, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
line = np.geomspace(16, 512, 50)
for name, points, closed, colour, marker, dash in (
    ("N_avg", average, isotropic_average_case_capacity(line), LIGHT["average"], "s", "-"),
    ("N_worst", worst, isotropic_worst_case_capacity(line), LIGHT["worst"], "o", "--"),
):
    ax.plot(line, closed - 1, dash, color=colour, label=f"${name[0]}_\\mathrm{{{name[2:]}}} - 1$, closed form")
    value, low, high = points.T
    bars = np.abs(points.T[1:] - value)
    ax.errorbar(dimensions, value - 1, bars, fmt=marker, color=colour, capsize=3, label="simulated")
ax.set(xscale="log", yscale="log", xlabel="$d_k$", ylabel="other associations held, $N - 1$", xticks=dimensions)
ax.xaxis.set_major_formatter("{x:g}")
ax.minorticks_off()
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## CSs that are not isotropic
#
# The theorem needs only `E|cos|` and `E[cos^2]` of the CSs in question. Here they are measured on samples of 400 CSs,
# and the capacity they predict is compared with memories of fresh CSs from the same source. `d_k` is 64 throughout, so
# the isotropic bounds would be 6.0 and 65 everywhere.


# %%
d_k = 64
spectrum = 1 / np.sqrt(np.arange(1, d_k + 1))  # standard deviations: variances fall as 1 / i
shared = unit(rng.normal(size=d_k)) * np.sqrt(d_k)
sources = {
    "isotropic": lambda n: rng.normal(size=(n, d_k)),
    "common part, cos 0.5": lambda n: rng.normal(size=(n, d_k)) + shared,
    "the same, centred": lambda n: (x := rng.normal(size=(n, d_k)) + shared) - x.mean(0),
    "anisotropic, variance 1/i": lambda n: rng.normal(size=(n, d_k)) * spectrum,
    "16 of 64 dimensions": lambda n: rng.normal(size=(n, d_k)) * (np.arange(d_k) < 16),
    "sparse, 5 % of entries": lambda n: rng.normal(size=(n, d_k)) * (rng.random((n, d_k)).argsort(1) < 3),
    "sparse and positive": lambda n: np.abs(rng.normal(size=(n, d_k))) * (rng.random((n, d_k)).argsort(1) < 3),
}
rows = []
for name, source in sources.items():
    samples = torch.from_numpy(np.stack([source(400) for _ in range(24)]))
    mean_absolute, mean_square = (x.mean().item() for x in pair_means(cosines(samples)))
    found = crosstalk(lambda n, s=source: unit(s(n)), 150, 600)
    for case, level, trials, predicted in (
        ("N_worst", 0.5, found[0], worst_case_capacity(mean_absolute)),
        ("N_avg", 1.0, found[1], average_case_capacity(1 / mean_square)),
    ):
        rows.append((name, case, predicted, *bootstrap(lambda x, le=level: capacity_of(le, x), trials, draws=500)))
given = pd.DataFrame(rows, columns=["CSs", "case", "predicted", "simulated", "lo", "hi"])
given["inside"] = (given.lo <= given.predicted) & (given.predicted <= given.hi)
print(given.round(2).to_string(index=False))
ratio = given.predicted / given.simulated
print(f"predicted over simulated: {ratio.min():.3f} to {ratio.max():.3f}; {given.inside.sum()} of {len(given)} inside")

# %%
fig, ax = plt.subplots(figsize=(7, 3.6), layout="constrained")
names = list(sources)
for case, colour, marker, shift in (("N_worst", LIGHT["worst"], "o", -0.12), ("N_avg", LIGHT["average"], "s", 0.12)):
    part = given[given.case == case]
    y = np.arange(len(part)) + shift
    bars = [part.simulated - part.lo, part.hi - part.simulated]
    label = f"${case[0]}_\\mathrm{{{case[2:]}}}$"
    ax.errorbar(part.simulated, y, xerr=bars, fmt=marker, color=colour, capsize=3, label=f"{label}, simulated")
    ax.plot(part.predicted, y, "|", color=LIGHT["ink"], ms=13, label="predicted from the CSs" if shift > 0 else None)
ax.set(xscale="log", xlabel="associations held", yticks=range(len(names)), yticklabels=names)
ax.set_xticks([2, 5, 10, 20, 50], ["2", "5", "10", "20", "50"])
ax.minorticks_off()
ax.invert_yaxis()
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# A part that all CSs share ruins a linear memory and costs a softmax head nothing, for softmax is blind to a constant
# added to every CS: that is why CSs are centred before they are compared. Sparse CSs are a gain in the worst case, for
# most pairs have nothing in common, and none on average, for the pairs that do have much.
#
# ## Looking up the nearest stored US
#
# If the response is only used to pick one of the `N` stored USs (random ones, of `d_v` dimensions), far more pairs fit:
# the crosstalk is spread over `d_v` dimensions and does no harm until it leans to one of the stored USs more than the
# signal does. Lines are the approximation derived in `theory/decoding.py`, points are simulated.


# %%
def decoded(load, d_k, d_v, memories):
    """Share of probes whose own US is nearest to the response, one number a memory."""
    keys, values = (unit(rng.normal(size=(memories, load, d)).astype("float32")) for d in (d_k, d_v))
    responses = keys @ (keys.swapaxes(1, 2) @ values)
    return ((responses @ values.swapaxes(1, 2)).argmax(2) == np.arange(load)).mean(1)


rows = []
for d_k, d_v in ((16, 16), (32, 32), (64, 64), (96, 96), (16, 64), (64, 16)):
    predicted = decoding_capacity(d_k, d_v)
    loads = np.unique(np.geomspace(0.7 * predicted, 1.5 * predicted, 6).round().astype(int))
    memories = max(24, 6000 // loads[0])
    success = np.stack([decoded(load, d_k, d_v, memories) for load in loads], axis=1)  # [memories, loads]
    found = bootstrap(lambda x, n=loads: crossing(0.5, x.mean(0), n), success)
    rows.append((d_k, d_v, found, predicted, isotropic_average_case_capacity(float(d_k))))
decoding = pd.DataFrame(rows, columns=["d_k", "d_v", "simulated", "approximation", "N_avg"])
print(decoding.assign(simulated=decoding.simulated.map(written)).round(1).to_string(index=False))

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for d, colour, dash, marker in zip((16, 32, 64), sns.color_palette(), ("-", "--", "-."), "osD", strict=False):
    loads = np.unique(np.geomspace(2, 3 * decoding_capacity(d, d), 40).round().astype(int))
    left.plot(loads, [decoding_success(n, d, d) for n in loads], dash, color=colour, label=f"$d_k = d_v = {d}$")
    some = loads[4::7]
    left.plot(some, [decoded(n, d, d, 12).mean() for n in some], marker, color=colour)
left.axhline(0.5, color=LIGHT["muted"], lw=1, ls=":")
left.set(xscale="log", xlabel="associations stored, $N$", ylabel="share of right answers", ylim=(0, 1.03))
left.legend(frameon=False)
squares = decoding[decoding.d_k == decoding.d_v]
line = np.geomspace(16, 128, 12)
right.plot(line, [decoding_capacity(d, d) for d in line], color=LIGHT["data"], label="decoding, approximation")
right.errorbar(
    squares.d_k,
    [x[0] for x in squares.simulated],
    np.abs(np.array([x[1:] - x[0] for x in squares.simulated]).T),
    fmt="o",
    color=LIGHT["data"],
    capsize=3,
    label="decoding, simulated",
)
right.plot(line, isotropic_average_case_capacity(line), "--", color=LIGHT["average"], label="$N_\\mathrm{avg}$")
right.plot(line, isotropic_worst_case_capacity(line), "-.", color=LIGHT["worst"], label="$N_\\mathrm{worst}$")
right.set(xscale="log", yscale="log", xlabel="$d_k = d_v$", ylabel="associations held", xticks=[16, 32, 64, 128])
right.xaxis.set_major_formatter("{x:g}")
right.minorticks_off()
right.legend(frameon=False, loc="upper left", fontsize="small")
right.set_ylim(top=2e4)
plt.show()

# %% [markdown]
# ## Softmax
#
# With scores `beta k . q` a softmax memory weighs crosstalk by `exp(beta cos)`, and loses half its fidelity at
# `N = 1 + exp(2 beta) / E[exp(2 beta cos)]` (crosstalk power over signal power, as for `N_avg`; for isotropic CSs the
# mean is a Bessel function). Two things follow. At a *fixed* inverse temperature the capacity does not go on growing
# with `d`: it levels off at `1 + exp(2 beta)`. Where `beta` grows with `d` it outgrows every power of `d`: as the
# exponential of `sqrt(d)` at `beta = sqrt(d)`, which is what CSs and queries with entries of unit size and the usual
# `1 / sqrt(d)` give, and as the exponential of `d` at `beta` proportional to `d`. The closed form compares mean powers,
# the simulation takes the mean squared fidelity: in few dimensions, where crosstalk differs much from probe to probe,
# the second lies a little higher.


# %%
def softmax_capacity(d, beta):
    """`1 + exp(2 beta) / E[exp(2 beta cos)]`, the mean being `Gamma(d/2) beta^(1-d/2) I_(d/2-1)(2 beta)`."""
    order = d / 2 - 1
    return 1 + np.exp(-(gammaln(d / 2) - order * np.log(beta) + np.log(ive(order, 2 * beta))))


def squared_fidelity(recall, load, trials, d_k, d_v=256, probes=48, centred=False):
    """Mean squared cosine between response and stored US, one number a trial; isotropic unit CSs and USs."""
    keys, values = (torch.nn.functional.normalize(torch.randn(trials, load, d), dim=-1) for d in (d_k, d_v))
    values = values - values.mean(1, keepdim=True) if centred else values
    asked = (torch.arange(min(load, probes)) * max(1, load / probes) + max(1, load / probes) / 2).long()
    responses = recall(keys, values, keys[:, asked], torch.full((len(asked),), load - 1))
    return torch.cosine_similarity(responses, values[:, asked], dim=-1).square().mean(1).numpy()


temperatures = {
    "beta = 1": lambda d: 1.0,
    "beta = 2": lambda d: 2.0,
    "beta = 4": lambda d: 4.0,
    "beta = sqrt(d)": np.sqrt,
    "beta = d / 4": lambda d: d / 4,
}
sizes = (4, 8, 12, 16, 24, 32, 48, 64)
rows = []
for name, beta in temperatures.items():
    for d in sizes:
        predicted = softmax_capacity(d, beta(d))
        if 2.5 < predicted < 3000:
            loads = np.unique(np.geomspace(0.6 * predicted, 1.8 * predicted, 5).round().clip(2).astype(int))
            scale = {"scale": float(beta(d))}
            trials = np.stack(
                [squared_fidelity(lambda *x, s=scale: RULES["softmax"](*x, **s), n, 8, d) for n in loads], axis=1
            )
            rows.append((name, d, predicted, *bootstrap(lambda x, n=loads: crossing(0.5, x.mean(0), n), trials)))
sharp = pd.DataFrame(rows, columns=["scores", "d", "closed form", "simulated", "lo", "hi"])
table = sharp.assign(simulated=[written(x) for x in sharp[["simulated", "lo", "hi"]].to_numpy()]).round(1)
print(table.drop(columns=["lo", "hi"]).to_string(index=False))

# %%
fig, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
line = np.linspace(4, 64, 100)
looks = zip(
    temperatures.items(), sns.color_palette(), ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), "os^Dv", strict=False
)
for (name, beta), colour, dash, marker in looks:
    ax.plot(
        line,
        [softmax_capacity(d, beta(d)) for d in line],
        ls=dash,
        color=colour,
        label=name.replace("beta", "$\\beta$"),
    )
    part = sharp[sharp.scores == name]
    bars = [part.simulated - part.lo, part.hi - part.simulated]
    ax.errorbar(part.d, part.simulated, bars, fmt=marker, color=colour, capsize=3)
ax.plot(line, isotropic_average_case_capacity(line), color=LIGHT["ink"], lw=2.5, label="linear, $N_\\mathrm{avg}$")
ax.set(yscale="log", ylim=(1, 1e6), xlabel="$d$", ylabel="associations at $f^2 = 1/2$")
ax.legend(frameon=False, ncols=2, loc="upper left")
plt.show()

# %% [markdown]
# ## What the learning rule changes
#
# The same pairs, learned by each rule, at `d_k = 64`. CSs are unit vectors, probes lie evenly over the stream, and
# capacity is the `N` at which the mean squared fidelity has fallen to 1/2. The covariance rule and the feature map
# respond with the mean US where nothing is associated; for them the USs of each memory are centred, so that this mean
# is zero.


# %%
def with_(rule, **parameters):
    return lambda *pairs: RULES[rule](*pairs, **parameters)


d_k = 64
learners = {
    "hebbian": with_("hebbian"),
    "covariance": with_("covariance"),
    "feature map, elu + 1": with_("feature_map"),
    "decay, lam 0.98": with_("decay", lam=0.98),
    "oja, eta 0.1": with_("oja", eta=0.1),
    "delta, eta 1": with_("delta", eta=1.0),
    "delta, 8 passes": with_("delta", eta=1.0, passes=8),
    "gated delta, 0.98": with_("gated_delta", alpha=0.98),
    "pseudoinverse": with_("pseudoinverse"),
    "softmax, beta 4": with_("softmax", scale=4.0),
}
loads = np.array([2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024, 2048])
rows, curves = [], {}
for name, learner in learners.items():
    used = loads if "softmax" in name else loads[loads <= 512]
    centred = name.startswith(("covariance", "feature map"))
    trials = np.stack([squared_fidelity(learner, n, 16, d_k, centred=centred) for n in used], axis=1)
    curves[name] = used, trials.mean(0)
    rows.append((name, bootstrap(lambda x, n=used: crossing(0.5, x.mean(0), n), trials)))
learned = pd.DataFrame(rows, columns=["rule", "N at f^2 = 1/2"]).set_index("rule")
print(learned.map(written).to_string())
print(f"closed forms: linear {isotropic_average_case_capacity(64.0):.0f}, softmax {softmax_capacity(64, 4.0):.0f}")

# %%
fig, ax = plt.subplots(figsize=(8, 4.2), layout="constrained")
order = sorted(curves, key=lambda name: learned.loc[name].item()[0])
dashes = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))] * 2
for name, colour, dash, marker in zip(order, sns.color_palette(n_colors=10), dashes, "os^DvPX<>*", strict=True):
    ax.plot(*curves[name], ls=dash, marker=marker, ms=4.5, color=colour, label=name)
line = np.geomspace(2, 512, 100)
ax.plot(
    line, expected_squared_fidelity(line, 64.0), color=LIGHT["ink"], lw=3, alpha=0.35, label="$1 / (1 + (N - 1) / d_k)$"
)
ax.axhline(0.5, color=LIGHT["muted"], lw=1, ls=":")
ax.set(xscale="log", xlabel="associations learned, $N$", ylabel="squared fidelity $f^2$", ylim=(0, 1.03))
ax.set_xticks(2 ** np.arange(1, 12), [str(n) for n in 2 ** np.arange(1, 12)])
ax.minorticks_off()
ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# - One pass of the delta rule holds at `f^2 = 1/2` no more than Hebbian learning does: it recalls what came last better
#   and what came first worse. It is going through the pairs again that pays, and the limit is the pseudoinverse: exact
#   up to `d_k` pairs, and `f^2 = d_k / N`, so 1/2 at `2 d_k`, from there on. No linear memory does better.
# - Forgetting costs capacity when early pairs are asked for as often as late ones.
# - The covariance rule, the first-order term of softmax, holds what a linear memory holds. What softmax has beyond that
#   lies in the higher orders, and so in the size of the scores.
# - `elu + 1` of unit CSs is nearly `1 + k`, and how strongly a CS is recalled then hangs mostly on the sum of its own
#   entries, whatever the query: hardly more than three pairs fit. It is made for CSs with larger entries, of its own.
