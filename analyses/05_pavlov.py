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
# # Does a language model condition, and by which rule?
#
# The experiments of classical conditioning, written as prompts: `A -> X` a few times, then `A ->`. A model that has
# been conditioned expects X there. What makes this more than a demonstration are the control groups: the same stimuli
# as often, with another history. A pure Hebbian memory, the paper's attention head, adds up pairings; an
# error-correcting one (Rescorla-Wagner) learns only what it did not yet expect. Blocking tells them apart: after
# `A -> X`, does `AB -> X` teach that B means X?
#
# Theories get one rate and one scale, fitted to acquisition and to nothing else; all their other predictions are bets.
#
# `MODEL` names another model than the embedded one, by hub id, folder or `.gguf` file; `DRAWS` how many random draws of
# stimuli. A minute or two on two cores for the embedded model.

# %%
import os

import matplotlib.pyplot as plt
import seaborn as sns

import pavinterp as pi

sns.set_theme(style="ticks", palette="colorblind", rc={"axes.spines.top": False, "axes.spines.right": False})
MODEL = os.environ.get("MODEL", "demo")
SHORT = "PAVINTERP_SHORT" in os.environ  # as the tests run it: too few draws to conclude anything
PARADIGMS = ["acquisition", "extinction", "latent_inhibition", "overshadowing", "blocking", "second_order"]

found = pi.condition(
    MODEL,
    paradigms=PARADIGMS[:2] if SHORT else PARADIGMS,
    draws=int(os.environ.get("DRAWS", 8 if SHORT else 40)),
    layouts=["sentence", "line"] if SHORT else None,
    progress=False,
)
print(*found.manifest["notes"], sep="\n")

# %% [markdown]
# ## Acquisition
#
# Experimental minus control group, in nats, over presentations of the CS: intervals over draws. The two lines are
# theories at their best rate and scale. A memory that adds up pairings is a straight line.

# %%
pi.plots.acquisition_curve(found.acquisition)
plt.show()
print(found.fits[["rate", "rate_lo", "rate_hi", "scale", "explained"]].round(3).to_string())

# %% [markdown]
# ## Every paradigm against its control
#
# Over all layouts, with layouts and draws as crossed random effects: where layouts disagree the interval is wide and
# the verdict `undecided`, whatever the number of draws.

# %%
pi.plots.paradigm_effects(found.verdicts)
plt.show()
columns = ["predicted", "observed", "observed_lo", "observed_hi", "by_layout", "verdict"]
print(found.verdicts.xs("conditioning", level="model")[columns].round(2).to_string())

# %% [markdown]
# By theory: how many of the decided contrasts are as it predicts.

# %%
told = found.verdicts[found.verdicts["verdict"] != "undecided"]
right = (told["verdict"] == "as predicted").groupby(level="model", sort=False).agg(["sum", "count"])
print(right.rename(columns={"sum": "as predicted", "count": "decided"}).to_string())

# %% [markdown]
# ## Which heads carry it?
#
# Direct logit attribution: the residual stream before the unembedding is a sum of writes, so that the response is a sum
# of parts. `us_attribution` is a head's part in the effect of acquisition. The sum over all components is the effect.

# %%
carriers = found.carriers
of_heads = carriers.heads.join(carriers.beside[["induction_score", "previous_token_score", "effective_load", "regime"]])
print(of_heads.sort_values("us_attribution", ascending=False).head(8).round(3).to_string())
print(carriers.components.loc["acquisition"].round(2).to_string())

# %% [markdown]
# Direct parts say who writes the US at the end, not who makes that possible. So heads are taken away (they respond with
# their mean over the prompts), ranked on one half of the draws and judged on the other. Heads with the largest
# previous-token score write nothing of the US themselves; without the first of them the embedded model acquires
# nothing.

# %%
pi.plots.conditioning_ablation(carriers.ablations)
plt.show()
print(carriers.kinds.round(2).to_string())
