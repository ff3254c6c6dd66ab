"""A plan from a measured run: what it takes is what the run's own tables say, also when read back from a folder."""

from __future__ import annotations

import json

import numpy as np
import pytest
from architectures import build
from test_run import stimuli

import pavinterp as pi
from pavinterp.cli import main
from pavinterp.measured_constants import Constants

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 24) for i in range(8)]


@pytest.fixture(scope="module")
def run():
    handle, text = pi.load(build("llama")), stimuli(DOCUMENTS)
    run = pi.measure(handle, text, progress=False)
    run.add(pi.head_redundancy(handle, text, pairs=0, ablated_layers=0, progress=False))
    return run.add(pi.error_propagation(handle, text, strengths=[0.1], draws=1, progress=False))


def test_constants_are_those_of_the_tables(run):
    found = Constants.of(run, None)
    assert found.load == pytest.approx(run.heads()["effective_load"].mean())
    layers = run.experiments["redundancy"].frames["layers"]
    assert found.distinct_share == pytest.approx((layers["distinct"] / layers["heads"]).mean())
    gain = run.experiments["propagate"].frames["layers"]["gain"]
    assert found.gains.tolist() == gain.tolist()
    assert found.gains_of(len(gain)) == pytest.approx(gain.to_numpy())
    assert found.gains_of(len(gain))[-1] == pytest.approx(1.0)  # after its own block is after the last block
    assert len(found.measured) == 3


def test_a_folder_gives_the_same_plan(run, tmp_path, capsys):
    folder = run.save(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--parameters", "500K", "--from", str(folder), "--vocabulary", "500", "--json"])
    out = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    plan = pi.plan(500_000, measured=run, vocabulary=500)
    assert [row["reliability"] for row in out["designs"]] == pytest.approx(plan.designs["reliability"].tolist())
    assert out["measured"] == list(plan.manifest["measured"])
    assert out["arguments"]["associations"] == pytest.approx(run.heads()["effective_load"].mean())
