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
# # What becomes of a retrieval error?
#
# A head's response is its target's unconditional stimulus (US) and interference of all the others. The paper's second
# result says that such errors travel through depth, and that width and redundant heads buy reliability back. Four
# questions, each put to a real model:
#
# 1. Is a head's retrieval error what its load predicts?
# 2. Does an error grow or die down on its way, and what does it cost at the end?
# 3. Do errors of all layers add up independently?
# 4. Are heads that write alike redundant?
#
# The embedded model alone is measured unless more are named, by hub id, folder or `.gguf` file, in the environment:
# `MODELS="HuggingFaceTB/SmolLM2-135M"`. `TEXT` names another text than the embedded one. Two minutes on two cores.

# %%
import os

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns

import pavinterp as pi

sns.set_theme(style="ticks", palette="colorblind", rc={"axes.spines.top": False, "axes.spines.right": False})
MODELS = ["demo", *os.environ.get("MODELS", "").split()]
TEXT = os.environ.get("TEXT", "demo")
SIZE = {"context": 128, "sequences": 12, "progress": False}

propagated, redundant = {}, {}
for name in MODELS:
    model = pi.load(name)
    propagated[model.name] = pi.error_propagation(model, TEXT, strengths=[0.03, 0.1, 0.3], draws=1, **SIZE)
    redundant[model.name] = pi.head_redundancy(model, TEXT, pairs=8, **SIZE)
    print(propagated[model.name], propagated[model.name].manifest["intervals"])


def with_interval(row, name, form="{:.2f}"):
    """`0.86 [0.80, 0.88]`."""
    return f"{form} [{form}, {form}]".format(row[name], row[f"{name}_lo"], row[f"{name}_hi"])


def panels():
    """One axes a model, side by side."""
    axes = plt.subplots(1, len(MODELS), figsize=(5.5 * len(MODELS), 4), squeeze=False, layout="constrained")[1]
    return zip(axes[0], propagated, strict=True)


# %% [markdown]
# ## 1. A head's error, as its load predicts it
#
# *Infidelity* `1 - f^2` is the share of a response's power that is not its target's US. The theorem predicts it from
# the effective load alone, with random USs; nothing is fitted. *Error* is the mean absolute difference over heads,
# *bias* the mean difference (predicted less measured), and *slope* that of measured on predicted.

# %%
for ax, name in panels():
    pi.plots.infidelity_calibration(propagated[name].heads, ax)
    ax.set_title(name)
plt.show()
for name, found in propagated.items():
    row = found.calibration.loc["theorem"]
    print(
        name, *(f"{column} {with_interval(row, column)}" for column in ("rank_correlation", "error", "bias", "slope"))
    )

# %% [markdown]
# ## 2. Through depth
#
# Interference of a layer's own, taken from other positions and made small, is added to what its attention writes. The
# gain is the relative change of the residual stream after a later block over that after the block itself. Below it,
# what the error costs in next-token predictions, beside isotropic noise of the same norm. First-order predictions by
# Jacobian-vector products are an independent witness of the same numbers.

# %%
for ax, name in panels():
    pi.plots.gain_map(propagated[name].gain, ax)
    ax.set_title(name)
plt.show()
for ax, name in panels():
    pi.plots.end_gains(propagated[name].ends, ax)
    ax.set_title(name)
plt.show()
for name, found in propagated.items():
    off = found.witness["difference"].abs()
    print(f"{name}: measured and first-order changes differ by {off.median():.2%} (median), {off.max():.2%} (largest)")

# %% [markdown]
# ## 3. All layers at once
#
# If errors of different layers are independent their squares add up, and the ratio to the root of the sum of squares is
# 1. Above 1 errors reinforce one another.

# %%
for name, found in propagated.items():
    rows = found.joint.reset_index().to_dict("records")
    table = [
        {"kind": row["kind"], "strength": row["strength"]}
        | {column: with_interval(row, column) for column in ("change_ratio", "divergence_ratio")}
        for row in rows
    ]
    print(name, pd.DataFrame(table).to_string(index=False), sep="\n")

# %% [markdown]
# ## 4. Redundant heads
#
# How many distinct heads a layer has by what they write (linear CKA), and whether pairs that write alike do the same
# for the predictions when they are ablated. CKA is blind to sign: two heads that write opposite things are alike by it,
# and cancel. The signed *alignment* is drawn for that reason.

# %%
for ax, name in panels():
    pi.plots.distinct_heads(redundant[name].layers, ax)
    ax.set_title(name)
plt.show()
for ax, name in panels():
    pi.plots.redundancy_of_pairs(redundant[name].pairs, ax)
    ax.set_title(name)
plt.show()
for name, found in redundant.items():
    total = found.total.iloc[0]
    print(f"{name}: {total['heads']:.0f} heads count as {with_interval(total, 'distinct', '{:.1f}')}")
    print(
        found.correlations.loc[("all", "mean")]
        .apply(lambda row: with_interval(row, "rank_correlation"), axis=1)
        .unstack("predictor")
        .to_string()
    )
