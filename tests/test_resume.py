"""Interrupted experiments: started again they end as if nothing had happened, and never take up other work's parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from architectures import build
from test_run import stimuli

import pavinterp as pi
from pavinterp.errors import UserError
from pavinterp.pieces import Pieces, kept_pieces

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 16) for i in range(8)]
TEXT = stimuli(DOCUMENTS)
EXPERIMENTS = {
    "measure": (pi.measure, {"tests": 8, "batch": 1}, ("records",)),
    "needed": (pi.needed_associations, {}, ("curves", "heads")),
    "swap": (pi.linearisation_cost, {"rules": ["covariance"]}, ("costs", "heads", "curve")),
    "rules": (pi.explain, {"rules": ["covariance", "delta"], "batch": 1}, ("rules", "heads")),
    "capacity": (pi.memory_capacity, {"rules": ["hebbian"], "batch": 1}, ("memories", "heads", "curves")),
    "budget": (pi.association_budget, {"max_loss_increase": 0.1}, ("heads", "methods", "curve")),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path))
    return tmp_path / "unfinished"


def whole(found, table):
    """A table of what was found, and all that a run's folder holds beside its records."""
    if table != "records":
        return [getattr(found, table)]
    return [found.records, found.heads(), found.details.tests, found.details.spectra]


def run(name, **options):
    function, own, _ = EXPERIMENTS[name]
    return function(pi.load(build("llama")), TEXT, **(own | {"progress": False} | options))


def interrupted(name, after, monkeypatch):
    """Ctrl-C after so many finished parts; returns how many were made."""
    made = []
    keep = Pieces.keep

    def counted(self, key, frame):
        if self.folder is not None and len(made) == after:
            raise KeyboardInterrupt
        made.extend([key] if self.folder is not None else [])
        return keep(self, key, frame)

    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "keep", counted)
        with pytest.raises(KeyboardInterrupt) as error:
            run(name, resume=True)
    assert error.value.__notes__ == ["finished parts are kept, the same command goes on from there"]
    return made


@pytest.mark.parametrize("after", [1, 7])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(name, after, monkeypatch, cache):
    made = interrupted(name, after, monkeypatch)
    (folder,) = cache.iterdir()
    assert len(set(made)) == len(list(folder.glob("*.parquet")))
    found_again = []
    read = Pieces.read

    def watched(self, key):
        frame = read(self, key)
        found_again.extend([key] if frame is not None else [])
        return frame

    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "read", watched)
        with pytest.warns(UserWarning, match="goes on where the same work was interrupted"):
            found = run(name, resume=True)
    assert set(found_again) >= {
        key for key in made if not key.endswith(("-tests", "-spectra"))
    }  # those precede records
    assert not list(cache.iterdir())
    expected = run(name)
    for table in EXPERIMENTS[name][2]:
        for one, other in zip(whole(found, table), whole(expected, table), strict=True):
            pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert found.manifest["certificate"] == expected.manifest["certificate"]


def test_other_work_begins_anew(monkeypatch, cache, recwarn):
    interrupted("needed", 3, monkeypatch)
    for options in ({"seed": 1}, {"renormalise": True}, {"layers": [1]}):
        run("needed", resume=True, **options)
    other = build("llama")
    other.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1
    pi.needed_associations(pi.load(other), TEXT, progress=False, resume=True)
    pi.needed_associations(pi.load(build("llama")), stimuli(DOCUMENTS[1:]), progress=False, resume=True)
    assert not [warning for warning in recwarn if "goes on" in str(warning.message)]
    assert len(list(cache.iterdir())) == 1  # the interrupted one's parts are still there


def test_hooks_and_words_are_refused():
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(UserError, match="resume with hooks on the model"):
        pi.needed_associations(pi.load(model), TEXT, progress=False, resume=True)
    with pytest.raises(UserError, match="resume must be True or False"):
        run("swap", resume="yes")


def test_a_part_that_was_cut_short_is_made_again(tmp_path):
    pieces = Pieces(tmp_path)
    frame = pd.DataFrame({"x": [0.1, np.nan, np.inf]}, index=pd.Index([3, 1, 2], name="place"))
    frame.attrs = {"residuals": {"0": [1e-7]}}
    pd.testing.assert_frame_equal(pieces.frame("one", lambda: frame), frame)
    pd.testing.assert_frame_equal(pieces.frame("one", lambda: None), frame)
    assert pieces.found == 1
    (tmp_path / "one.parquet").write_bytes((tmp_path / "one.parquet").read_bytes()[:100])
    pd.testing.assert_frame_equal(pieces.frame("one", lambda: frame), frame)
    assert pieces.found == 1


def test_a_cache_that_cannot_be_written_costs_the_parts_alone(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="finished parts are not kept"), kept_pieces({"x": 1}) as pieces:
        assert pieces.frame("one", lambda: pd.DataFrame({"x": [1]}))["x"].tolist() == [1]
    pieces = Pieces(tmp_path / "file" / "in the way")
    with pytest.warns(UserWarning, match="not kept any more"):
        pieces.frame("one", lambda: pd.DataFrame({"x": [1]}))


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path, cache):
    """kill -9 in the midst of it, at a time drawn anew for each part that is there; then the same command again."""
    command = [sys.executable, "-m", "pavinterp", "needed", "demo", "--layers", "2", "--heads", "3"]
    command += ["--sequences", "3", "--context", "24", "--csv"]
    environment = os.environ | {"PAVINTERP_CACHE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    subprocess.run([*command, str(tmp_path / "whole.csv"), "-q"], env=environment, check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, str(tmp_path / "a.csv")], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    while process.poll() is None and not list(cache.glob("*/needed-0-2.parquet")):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "a.csv").exists()
    assert list(cache.glob("*/*.parquet"))
    again = subprocess.run([*command, str(tmp_path / "a.csv"), "-q"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0
    assert "note: goes on where the same work was interrupted" in again.stderr
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_parts_that_nobody_came_back_for_are_removed(monkeypatch, cache):
    interrupted("needed", 2, monkeypatch)
    (old,) = cache.iterdir()
    run("swap", resume=True)
    assert old.exists()
    for path in (*old.iterdir(), old):
        os.utime(path, (0, 0))
    run("swap", resume=True)
    assert not list(cache.iterdir())
