"""The whole experiment on the embedded model: tables, what is left out, resume, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny

import pavinterp as pi
from pavinterp.cli import main
from pavinterp.errors import UserError
from pavinterp.experiments import conditioned_responses

SMALL = {
    "paradigms": ["acquisition", "blocking"], "draws": 10, "layouts": ["sentence", "line"], "heads": False,
    "progress": False,
}  # fmt: skip
MINE = """
name = "mine"
about = "A alone"
source = "here"
test = "A"
response = "X"
predicts = "higher"
[groups]
experimental = ["A -> X x4"]
control = ["C -> X x4"]
"""


@pytest.fixture(scope="module")
def found(demo):
    return pi.condition(demo, **SMALL)


def test_the_embedded_model_acquires(found):
    row = found.effects.loc[("acquisition", "control", "all")]
    assert row["effect_lo"] > 3
    curve = found.trials.loc[("acquisition", "experimental", "all", "A"), "response"].to_numpy()
    assert len(curve) == 9
    assert curve[0] < 2 < curve[2] < curve[8]
    verdicts = found.verdicts.xs("acquisition", level="paradigm")
    assert (verdicts["verdict"] == "as predicted").all()
    assert (verdicts["layouts_as_predicted"] == 2).all()
    assert found.fits.loc["rescorla_wagner", "explained"] > 0.9


def test_tables_agree_with_one_another(found):
    tests = found.tests.groupby(["paradigm", "group", "layout"])["response"].mean()
    for (paradigm, control, layout), row in found.effects.iterrows():
        if layout == "all":
            continue
        one, two = (tests.loc[(paradigm, group, layout)] for group in ("experimental", control))
        assert row["effect"] == pytest.approx(one - two)
    curve = found.trials[found.trials["test"]].droplevel(["cs", "presentation"])
    for key, value in tests.items():
        assert curve.loc[key, "response"] == pytest.approx(value)
    assert (found.trials["response_lo"] <= found.trials["response"]).all()
    margin = found.manifest["margin"]
    assert margin == pytest.approx(max(0.2, 0.05 * found.effects.loc[("acquisition", "control", "all"), "effect"]))
    assert len(found.stimuli.query("paradigm == 'blocking' and draw == 0")) == 4 + 8
    assert json.dumps(found.manifest)


def test_what_a_run_keeps(found):
    kept = found.experiment()
    assert kept.name == "condition"
    assert kept.numbers.index.names == ["layer", "head"]
    assert len(kept.numbers) == 32
    assert set(kept.frames) == {"trials", "effects", "verdicts", "fits", "acquisition"}


def test_the_curve_that_theories_are_fitted_to(found):
    curve, trials = found.acquisition, found.trials.loc["acquisition"]
    assert list(curve.index) == list(range(1, 10))
    groups = [trials.loc[(name, "all", "A"), "response"].to_numpy() for name in ("experimental", "control")]
    np.testing.assert_allclose(curve["difference"], groups[0] - groups[1])
    for model, fit in found.fits.iterrows():
        error = ((curve["difference"] - curve[model]) ** 2).sum() / (curve["difference"] ** 2).sum()
        assert 1 - error == pytest.approx(fit["explained"], abs=1e-6)


def test_a_paradigm_of_ones_own(demo, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE, encoding="utf-8")
    one = pi.condition(demo, paradigms=[file], draws=8, layouts=["line"], heads=False, progress=False)
    assert list(one.effects.index) == [("mine", "control", "line"), ("mine", "control", "all")]
    assert one.effects["effect"].iloc[0] > 3
    assert len(one.fits) == 0
    assert one.verdicts["size"].isna().all()


def test_interrupted_work_goes_on(demo, found, monkeypatch):
    whole, calls = conditioned_responses.responses, []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    monkeypatch.setattr(conditioned_responses, "responses", broken)
    with pytest.raises(KeyboardInterrupt):
        pi.condition(demo, **SMALL, resume=True)
    calls[:] = [0] * 10
    with pytest.warns(UserWarning, match="goes on"):
        again = pi.condition(demo, **SMALL, resume=True)
    assert len(calls) == 10 + 8 - 3
    np.testing.assert_array_equal(again.effects["effect"], found.effects["effect"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"paradigms": ["bloking"]}, "no paradigm 'bloking'"),
        ({"paradigms": "blocking"}, "must be a list"),
        ({"paradigms": ["blocking", "blocking"]}, "given twice"),
        ({"layouts": ["table"]}, "arrow, colon, sentence, line"),
        ({"draws": 1}, "draws must be"),
        ({"margin": -1}, "margin must be"),
        ({"stimuli": "nouns"}, "give words, random, nonsense, or a text file"),
    ],
)
def test_mistakes_are_named_in_a_line(demo, arguments, words):
    with pytest.raises(UserError, match=words) as said:
        pi.condition(demo, **{"draws": 2, "progress": False, "paradigms": ["blocking"], "heads": False, **arguments})
    assert "\n" not in str(said.value)


def test_prompts_that_are_too_long(demo):
    short = pi.load(tiny.gpt2(positions=48), tokenizer=tiny.tokenizer())
    given = {"draws": 2, "stimuli": "random", "layouts": ["line"], "heads": False, "progress": False}
    with pytest.raises(UserError, match=r"blocking: \d+ tokens in the layout line, and .* has 48 positions"):
        pi.condition(short, paradigms=["blocking"], **given)
    some = pi.condition(short, **given)
    assert "blocking" in some.manifest["left_out"]
    assert "overshadowing" in set(some.effects.index.get_level_values("paradigm"))
    assert any("Left out: blocking" in note for note in some.manifest["notes"])


def test_the_command(capsys, tmp_path):
    file = tmp_path / "effects.csv"
    arguments = [
        "condition",
        "demo",
        "--paradigms",
        "acquisition",
        "--draws",
        "8",
        "--layouts",
        "line",
        "--no-heads",
        "--quiet",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--csv", str(file)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("acquisition ")
    assert "as predicted" in out
    assert file.read_text().startswith("paradigm,control,layout,effect,")
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    read = json.loads(capsys.readouterr().out)
    assert read["model"]["name"] == "demo"
    assert {row["model"] for row in read["verdicts"]} >= {"conditioning", "rescorla_wagner", "hebbian"}
    assert read["command"].startswith("pavinterp condition demo")
    with pytest.raises(SystemExit) as ended:
        main(["condition", "demo", "--paradigms", "none"])
    assert ended.value.code == 2
