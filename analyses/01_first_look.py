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
# # A first look: what do the heads of a small model remember?
#
# Attention read as conditioning: each earlier token is a pair of a *conditional stimulus* (its key) and an
# *unconditional stimulus* (its value), and a query is a *test* of that memory. This notebook loads the embedded model
# (4 layers x 8 heads, trained on Shakespeare and Milton), measures every head on text it was not trained on, and looks
# at the pictures one by one. It needs no network and runs in about a minute on two cores.
#
# Change `"demo"` to `"gpt2"`, to a folder or to a model you already hold, and everything below works the same.

# %%
import pavinterp as pi

model = pi.load("demo")
text = pi.corpus("demo")
print(f"{model.name}: {model.architecture}, {model.parameters:,} parameters")
print(f"{len(text.documents)} documents, from {text.documents[0][0]} to {text.documents[-1][0]}")

# %%
run = pi.measure(model, text, context=256, sequences=32)
heads = run.heads()
print(heads.attrs["intervals"])
certificate = run.manifest["certificate"]
print(f"certificate: {certificate['largest']:.1e}, tolerance {certificate['tolerance']:.0e}")

# %% [markdown]
# The certificate says that the responses rebuilt from the captured queries, keys and values are, to rounding, those
# that the model computed. Without it none of the numbers below would mean anything.
#
# `heads` is an ordinary DataFrame with one row a head. What a column means and what it counts is in `pi.describe()`.

# %%
columns = ["effective_load", "effective_load_lo", "effective_load_hi", "capacity_worst", "capacity_average", "regime"]
print(heads[columns].round(2).to_string())

# %%
print(pi.describe().loc[["effective_load", "capacity_worst", "fidelity", "d_eff"]].to_string())

# %% [markdown]
# ## Load against the bounds
#
# `effective_load` is the number of associations that a head's response is made of: 1 for a head that copies one
# token, many for a head that averages. A *linear* memory with `d_k = 32` recalls about 4.5 associations without error
# in the worst case and about 33 with useful fidelity on average. The heads measured are softmax heads, so a load above
# a bound does not mean that a head fails; it means that a linear memory of that size would.

# %%
pi.plots.load_ranking(heads)

# %% [markdown]
# Every head is one point with its 95 % interval, in rising order, between the two bounds. The next picture lays the
# same numbers out by layer and head: colour is load over the worst-case bound on a logarithmic scale, frames show the
# regime.

# %%
pi.plots.load_map(heads)

# %%
pi.plots.load_by_depth(heads)

# %% [markdown]
# ## Two heads that are known
#
# On repeated random tokens a *previous-token head* attends to the position before, and an *induction head* to the
# token that followed the last occurrence of the present one. A previous-token head retrieves mostly one association,
# so its load should be among the smallest, between 1 and a few (some strength stays on other positions). That is a
# check on the measure as much as a finding.

# %%
previous = heads["previous_token_score"].idxmax()
induction = heads["induction_score"].idxmax()
for name, head in (("previous-token", previous), ("induction", induction)):
    row = heads.loc[head]
    print(
        f"{name} head: layer {head[0]}, head {head[1]}; previous-token score {row['previous_token_score']:.2f}, "
        f"induction score {row['induction_score']:.2f}; load on text {row['effective_load']:.2f} "
        f"[{row['effective_load_lo']:.2f}, {row['effective_load_hi']:.2f}]"
    )

# %%
pi.plots.head_kinds(heads.loc[induction])

# %% [markdown]
# ## One head closely
#
# How the load of a head is spread over tests, how it grows with the context, and how purely the head retrieves its
# strongest association beside what a linear memory of the same size would manage. The one chosen is the head with the
# median load.

# %%
middle = (heads["effective_load"] - heads["effective_load"].median()).abs().idxmin()
row, tests = heads.loc[middle], run.details.tests
print(f"layer {middle[0]}, head {middle[1]}: load grows as position^{row['load_growth']:.2f}")
pi.plots.load_distribution(tests, row)

# %%
pi.plots.load_position(tests, row)

# %%
pi.plots.fidelity_load(tests, row)

# %%
pi.plots.spectrum(run.details.spectra, row)

# %% [markdown]
# The spectrum shows along how many directions the head's (centred) conditional stimuli really vary. Its participation
# ratio is `d_eff`: where it is far below `d_k`, the head's own capacity is far below the isotropic one.
#
# ## What a head associates
#
# For a few tests of each head the run keeps the strongest associations: the token that was the conditional stimulus,
# its share of the response, and the tokens that its value promotes at the output.

# %%
for example in [e for e in run.details.examples if (e["layer"], e["head"]) == induction][:2]:
    before = "".join(example["tokens"][-12:-1])
    print(f"test {example['tokens'][-1]!r} after {before!r}; load {example['effective_load']:.1f}")
    for association in example["associations"][:3]:
        print(
            f"   {association['share']:5.0%} from {association['token']!r} in "
            f"{association['before'] + '[' + association['token'] + ']' + association['after']!r}"
            f" promoting {association['promotes'][:3]}"
        )

# %% [markdown]
# `run.report("reports/mine")` writes all of this as pages that open from disk, one a head.
