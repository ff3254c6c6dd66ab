"""Which heads carry conditioning: parts sum up to effects, ablations are what hooks of one's own do, tables agree."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from scipy import stats
from test_conditioned_responses import LAYOUTS, PARADIGM, draws

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments import conditioned_heads, conditioned_responses
from pavinterp.experiments.ablations import mean_replacement
from pavinterp.experiments.conditioned_heads import even_and_odd, responses_without, sets_of
from pavinterp.experiments.conditioned_responses import parts_of, prompts
from pavinterp.models import untouched
from pavinterp.pieces import Pieces
from pavinterp.stimuli import tokenise

GIVEN = {
    "paradigms": ["acquisition", "contingency"], "draws": 18, "layouts": ["sentence", "line"],
    "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(demo):
    return pi.condition(demo, **GIVEN)


def by_draw(found, paradigm, control="control"):
    tests = found.tests[found.tests["paradigm"] == paradigm].groupby(["group", "draw"])["response"].mean()
    return (tests.loc["experimental"] - tests.loc[control]).to_numpy()


def test_parts_sum_up_to_every_effect(found):
    """Of paradigms with a baseline too: what is added up comes from writes, the effect from logits."""
    assert len(found.effects) == 6
    for paradigm, control, _ in found.effects.xs("all", level="layout", drop_level=False).index:
        whole = found.carriers.components.loc[(paradigm, control, "all"), "attribution"]
        assert whole == pytest.approx(by_draw(found, paradigm, control).mean(), abs=1e-4)
        parts = found.carriers.components.loc[(paradigm, control)].drop("all")["attribution"]
        assert parts.sum() == pytest.approx(whole, abs=1e-9)
        every = found.carriers.attributions.xs((paradigm, control), level=("paradigm", "control"))
        assert every["attribution"].sum() == pytest.approx(whole, abs=1e-9)
        assert every.xs("head", level="component")["attribution"].sum() == pytest.approx(parts["head"], abs=1e-9)


def test_heads_table_is_acquisitions(found):
    heads = found.carriers.heads
    mine = found.carriers.attributions.xs(
        ("head", "acquisition", "control"), level=("component", "paradigm", "control")
    )
    np.testing.assert_allclose(heads["us_attribution"], mine["attribution"])
    np.testing.assert_allclose(heads["us_strength"], mine["us_strength"])
    assert (heads["us_attribution_lo"] < heads["us_attribution_hi"]).all()
    assert heads["us_strength"].between(0, 1).all()
    kept = found.experiment()
    assert set(kept.frames) >= {"attributions", "components", "kinds", "ablations"}
    assert set(kept.numbers.attrs["units"]) == {"us_attribution", "us_strength"}


def test_induction_heads_carry_acquisition_in_the_embedded_model(found):
    first = found.carriers.heads["us_attribution"].nlargest(3).index
    assert set(first) == set(found.carriers.beside["induction_score"].nlargest(3).index)
    left = found.carriers.ablations.xs(("acquisition", "control"))["left"]
    assert left["attribution", 4, 0] < 0.25
    assert left["previous_token_score", 1, 0] < 0.1  # they read what it writes


def test_kinds_are_rank_correlations(found):
    heads, beside = found.carriers.heads, found.carriers.beside
    for of, name in found.carriers.kinds.index:
        row = found.carriers.kinds.loc[(of, name)]
        assert row["rank_correlation"] == pytest.approx(stats.spearmanr(heads[of], beside[name]).statistic)
        assert row["rank_correlation_lo"] <= row["rank_correlation"] <= row["rank_correlation_hi"]
        assert row["by_chance"] == pytest.approx(2 * 2 / 32)


def test_the_whole_is_the_effect_of_the_judged_draws(found):
    chosen, judged = even_and_odd(18)
    assert (chosen[0], judged[0], len(chosen), len(judged)) == (0, 1, 9, 9)
    for (paradigm, control, *_), row in found.carriers.ablations.iterrows():
        assert row["whole"] == pytest.approx(by_draw(found, paradigm, control)[judged].mean())
        assert row["change"] == pytest.approx(row["effect"] - row["whole"])
        told = row["whole_lo"] > 0 or row["whole_hi"] < 0
        assert np.isnan(row["left"]) != told
        if told:
            assert row["left"] == pytest.approx(row["effect"] / row["whole"])
    few = found.carriers.ablations.xs("contingency", level="paradigm").reset_index()
    assert set(few["order"]) == {"attribution", "random"}
    assert set(few["count"]) == {2}


def test_ablation_is_what_a_hook_does():
    model, chosen = tiny.llama(), [0, 2]
    handle, drawn = pi.load(model), {PARADIGM.name: draws()}
    parts = [part for part in parts_of([PARADIGM], LAYOUTS[:1]) if not part.baseline]
    heads = [(0, 1), (1, 3)]
    acquisition = [conditioned_responses.Part(part.paradigm, part.group, part.layout, part.baseline) for part in parts]
    tested = {part.group.name: prompts(PARADIGM, part.group, draws(), part.layout, [0]) for part in parts}
    text = tokenise(pi.corpus([one.prompt.tokens for one in tested["experimental"]]), None, context=2**9)
    with untouched(model):
        means = mean_replacement(handle, text, heads)
        rows = responses_without(
            handle, acquisition, drawn, {("mine", 2, 0): heads}, [("mine", 2, 0)], means, chosen, start=[0], seed=0,
            batch=None, stage=lambda *_: None, pieces=Pieces(),
        )  # fmt: skip
    assert set(rows["draw"]) == set(chosen)
    totals, count = {head: torch.zeros(8) for head in heads}, 0
    for one in tested["experimental"]:  # means, by a plain loop over hooks
        seen = {}
        hooks = [
            model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(
                lambda m, x, layer=layer: seen.__setitem__(layer, x[0][0])  # noqa: B023
            )
            for layer in (0, 1)
        ]
        with torch.no_grad():
            model(input_ids=torch.from_numpy(one.prompt.tokens)[None])
        for hook in hooks:
            hook.remove()
        count += len(one.prompt.tokens)
        for layer, head in heads:
            totals[layer, head] += seen[layer][:, 8 * head : 8 * head + 8].sum(0)

    def put(layer, head):
        def hook(module, inputs):
            changed = inputs[0].clone()
            changed[..., 8 * head : 8 * head + 8] = totals[layer, head] / count
            return (changed,)

        return model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(hook)

    for layer, head in heads:
        put(layer, head)
    for row in rows.to_dict("records"):
        one = tested[row["group"]][row["draw"]]
        with torch.no_grad():
            last = model(input_ids=torch.from_numpy(one.prompt.tokens)[None]).logits[0, -1].double()
        assert row["response"] == pytest.approx(float(last[one.us] - last[one.foils.tolist()].mean()), abs=1e-5)


def test_sets_are_the_first_of_each_order_and_as_many_others():
    every = [(layer, head) for layer in range(5) for head in range(8)]
    orders = {"one": every[::-1], "two": every}
    sets, everywhere = sets_of(orders, every, 0)
    assert sorted({count for _, count, _ in sets}) == [1, 2, 4]  # 5 % of 40 is 2; a quarter is 10
    assert everywhere == [("one", 2, 0), ("random", 2, 0)]
    assert sets["one", 4, 0] == every[::-1][:4]
    for (order, count, _), heads in sets.items():
        assert len(set(heads)) == count
        if order == "random":
            assert not set(heads) & set(every[::-1][:count])
    assert sets_of(orders, every, 0) == (sets, everywhere)
    assert sets_of(orders, every, 1)[0] != sets
    one, _ = sets_of({"one": [(0, 0)]}, [(0, 0)], 0)
    assert one == {("one", 1, 0): [(0, 0)]}  # none is left to draw


def test_a_model_whose_logits_have_no_parts():
    model = tiny.llama()
    model.lm_head.register_forward_hook(lambda m, x, y: 2 * y)
    given = {"paradigms": ["acquisition"], "draws": 8, "layouts": ["line"], "stimuli": "random", "progress": False}
    found = pi.condition(pi.load(model, tokenizer=tiny.tokenizer()), **given)
    assert found.carriers.heads["us_attribution"].isna().all()
    assert found.carriers.heads["us_strength"].notna().all()
    assert len(found.carriers.components) == 0
    assert "us_strength" in found.carriers.ablations.index.get_level_values("order")
    assert any("not linear" in note for note in found.manifest["notes"])


def test_without_acquisition_none_is_chosen(demo):
    found = pi.condition(demo, paradigms=["overshadowing"], draws=8, layouts=["line"], progress=False)
    assert not len(found.carriers.heads.columns)
    assert not len(found.carriers.ablations)
    assert len(found.carriers.attributions)
    assert any("Acquisition is not among" in note for note in found.manifest["notes"])
    assert not len(found.experiment().numbers.columns)


def test_interrupted_work_of_heads_goes_on(demo, found, monkeypatch):
    own, calls = conditioned_heads._contrasts, []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(*args, **kwargs)

    monkeypatch.setattr(conditioned_heads, "_contrasts", broken)
    with pytest.raises(KeyboardInterrupt):
        pi.condition(demo, **GIVEN, resume=True)
    calls[:] = [0] * 10
    with pytest.warns(UserWarning, match="goes on"):
        again = pi.condition(demo, **GIVEN, resume=True)
    assert len(calls) == 11
    np.testing.assert_array_equal(again.carriers.heads["us_attribution"], found.carriers.heads["us_attribution"])
    np.testing.assert_array_equal(again.carriers.ablations["effect"], found.carriers.ablations["effect"])


def test_heads_is_yes_or_no(demo):
    with pytest.raises(UserError, match="heads"):
        pi.condition(demo, heads="all")
