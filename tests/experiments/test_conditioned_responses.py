"""Response strength against a plain loop over prompts and prefixes; batches; who is compared with whom."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.experiments.conditioned_responses import logits_of, measured, parts_of, prompts, responses
from pavinterp.experiments.conditioning_stimuli import Draw
from pavinterp.experiments.trial_layouts import Layout
from pavinterp.theory.schedules import parse, trials

PARADIGM = parse(
    {
        "name": "mine", "about": "-", "source": "-", "test": "A", "response": "X", "predicts": "higher",
        "baseline": "D",
        "groups": {
            "experimental": ["A -> X x3, C -> Y x3", "AC -> X x2, -> X x1"],
            "control": ["C -> X x6, filler x3"],
        },
    }
)  # fmt: skip
LAYOUTS = [Layout("arrow", (7, 8), (9,)), Layout("line", (), (9,))]


def draws(number=3):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(number):
        ids = rng.permutation(np.arange(20, 290))
        found.append(Draw(dict(zip("ACDXY", ids[:5].tolist(), strict=True)), ids[5:9], ids[9:20], {}))
    return found


@pytest.mark.parametrize("build", [tiny.llama, tiny.gemma3, lambda: tiny.gpt2(positions=128)])
def test_responses_equal_a_plain_loop(build):
    model = build()
    handle = pi.load(model)
    mine = draws()
    got = measured(logits_of(handle), parts_of([PARADIGM], LAYOUTS), {"mine": mine}, start=[0], vocabulary=300)
    assert len(got) == sum(2 * 3 * n for n in (9 + 1, 6 + 1)) * 2  # layouts, draws, tests and baselines
    seen = 0
    for layout in LAYOUTS:
        for group in PARADIGM.groups:
            for baseline in (False, True):
                for number, drawn in enumerate(mine):
                    ids = [0]
                    rows = got.query(
                        f"layout == '{layout.name}' and group == '{group.name}' and draw == {number} "
                        f"and baseline == {baseline}"
                    ).set_index("trial")
                    order = np.array(prompts(PARADIGM, group, mine, layout, [0])[number].prompt.tokens)
                    listed, used = trials(PARADIGM, group.name, number), 0
                    for place, trial in enumerate(listed):
                        if trial.filler:
                            for _ in range(len(layout.between) + 2):
                                ids.append(int(drawn.filler[used % len(drawn.filler)]))
                                used += 1
                            ids += layout.after
                            assert place not in rows.index
                            continue
                        ids += order[len(ids) : len(ids) + len(trial.cs)].tolist()  # in the order of the prompt
                        ids += layout.between
                        seen += check(model, ids, drawn, rows.loc[place])
                        ids += [] if trial.us is None else [drawn.tokens[trial.us]]
                        ids += layout.after
                    ids += [drawn.tokens["D" if baseline else "A"], *layout.between]
                    assert rows.loc[len(listed), "test"]
                    seen += check(model, ids, drawn, rows.loc[len(listed)])
    assert seen == len(got)


def check(model, ids, drawn, row):
    with torch.no_grad():
        last = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
    us = last[drawn.tokens["X"]]
    assert row["response"] == pytest.approx(float(us - sum(last[int(t)] for t in drawn.foils) / 4), abs=1e-4)
    assert row["probability"] == pytest.approx(float(last.softmax(-1)[drawn.tokens["X"]]), rel=1e-4)
    above = int((last > us + 1e-4).sum())
    assert above < row["rank"] <= int((last > us - 1e-4).sum()) + 1
    return 1


def test_batches_change_nothing():
    handle = pi.load(tiny.llama())
    made = prompts(PARADIGM, PARADIGM.groups[0], draws(5), LAYOUTS[0], [0])
    one, many = (responses(logits_of(handle), made, vocabulary=300, batch=batch) for batch in (1, None))
    np.testing.assert_allclose(one["response"], many["response"], atol=1e-5)
    assert one["cs"].tolist() == many["cs"].tolist()


def test_presentations_are_counted_by_exactly_these_css():
    made = prompts(PARADIGM, PARADIGM.groups[0], draws(), LAYOUTS[0])
    got = responses(lambda tokens, positions: torch.zeros(len(tokens), len(positions), 300), made)
    for _, rows in got.groupby("draw"):
        counts = rows.groupby("cs", sort=False)["presentation"].agg(list).to_dict()
        assert counts == {"A": [1, 2, 3, 4], "C": [1, 2, 3], "AC": [1, 2], "": [1]}
    assert (got["response"] == 0).all()


def test_others_are_uss_that_are_presented_as_often():
    """In acquisition X and Y come equally often; here X comes six times and Y three: there is none to compare with."""
    from pavinterp import paradigms as library

    acquisition = library.builtin()["acquisition"]
    made = prompts(acquisition, acquisition.groups[0], draws(), LAYOUTS[0])
    assert [one.others for one in made] == [(one.tokens["Y"],) for one in draws()]
    assert all(one.others == () for one in prompts(PARADIGM, PARADIGM.groups[0], draws(), LAYOUTS[0]))

    def counting(tokens, positions):  # the logit of a token is its id
        return torch.arange(300.0).expand(len(tokens), len(positions), 300)

    got = responses(counting, made)
    for number, drawn in enumerate(draws()):
        rows = got[got["draw"] == number]
        assert (rows["against_others"] == drawn.tokens["X"] - drawn.tokens["Y"]).all()
        assert (rows["response"] == drawn.tokens["X"] - drawn.foils.mean()).all()
        assert (rows["rank"] == 300 - drawn.tokens["X"]).all()


def test_logits_that_are_not_finite_are_named():
    made = prompts(PARADIGM, PARADIGM.groups[0], draws(), LAYOUTS[0])
    with pytest.raises(UserError, match="not finite"):
        responses(lambda tokens, positions: torch.full((len(tokens), len(positions), 300), torch.nan), made)
