"""Interrupted experiments: started again they end as if nothing had happened, and never take up other work's parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
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
    "redundancy": (pi.head_redundancy, {"pairs": 2}, ("effects", "heads", "layers", "correlations")),
    "prune": (pi.head_importance, {}, ("effects", "curves", "heads", "predictors", "curve")),
    "propagate": (pi.error_propagation, {"strengths": [0.1, 0.3]}, ("heads", "rows", "gain", "joint", "witness")),
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
    assert error.value.__notes__ == [f"{len(set(made))} finished parts are kept, the same command goes on from there"]
    return made


@pytest.mark.parametrize("after", [1, 7])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(name, after, monkeypatch, cache):
    made = interrupted(name, after, monkeypatch)
    (folder,) = cache.iterdir()
    assert len(set(made)) == len(list(folder.glob("*.part")))
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


def lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["o_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted.add_adapter("other", config)
    return adapted.eval()


def one_weight(model):
    model.model.layers[1].self_attn.o_proj.weight.data[5, 5] += 3


def a_buffer(model):
    model.model.rotary_emb.inv_freq.mul_(1.1)


def an_attribute(model):
    model.model.layers[0].self_attn.scaling *= 2


def an_adapter(model):
    model.set_adapter("other")


def no_adapter(model):
    model.base_model.disable_adapter_layers()


@pytest.mark.parametrize("change", [one_weight, a_buffer, an_attribute, an_adapter, no_adapter])
def test_a_model_changed_in_memory_is_another(change, monkeypatch, recwarn):
    model = build("llama")
    if change in (an_adapter, no_adapter):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = lora(model)
    keep = Pieces.keep

    def counted(self, key, frame):
        if self.folder is not None and len(list(self.folder.glob("*.part"))) == 4:
            raise KeyboardInterrupt
        return keep(self, key, frame)

    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "keep", counted)
        with pytest.raises(KeyboardInterrupt):
            pi.needed_associations(pi.load(model), TEXT, progress=False, resume=True)
    change(model)
    found = pi.needed_associations(pi.load(model), TEXT, progress=False, resume=True)
    assert not [warning for warning in recwarn if "goes on" in str(warning.message)]
    expected = pi.needed_associations(pi.load(model), TEXT, progress=False)
    pd.testing.assert_frame_equal(found.curves, expected.curves, check_exact=True)


@pytest.mark.parametrize("name", ["swap", "budget", "rules"])
def test_other_documents_are_another_text(name, monkeypatch, recwarn):
    interrupted(name, 3, monkeypatch)
    function, own, tables = EXPERIMENTS[name]
    text = replace(TEXT, document=np.array([0, 0, 0, 0, 1, 1, 2, 3]))
    found, expected = (
        function(pi.load(build("llama")), text, progress=False, resume=resume, **own) for resume in (True, False)
    )
    assert not [warning for warning in recwarn if "goes on" in str(warning.message)]
    for table in tables:
        pd.testing.assert_frame_equal(getattr(found, table), getattr(expected, table), check_exact=True)


def test_hooks_of_transformers_only_look():
    model = build("llama")
    model(torch.arange(5)[None], output_hidden_states=True)  # its hooks stay
    assert any(module._forward_hooks for module in model.modules())
    pi.needed_associations(pi.load(model), TEXT, layers=[0], progress=False, resume=True)


def test_a_flipped_bit_is_noticed(tmp_path):
    pieces = Pieces(tmp_path)
    frame = pd.DataFrame({"x": np.linspace(0, 1, 40), "layer": np.arange(40)})
    content = bytearray((pieces.keep("one", frame), (tmp_path / "one.part").read_bytes())[1])
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 300).tolist():
        flipped = content.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "one.part").write_bytes(flipped)
        with pytest.warns(UserWarning, match="one.part is damaged .*set aside as one.part.damaged and measured again"):
            assert pieces.read("one") is None
        assert (tmp_path / "one.part.damaged").read_bytes() == flipped


def test_a_part_that_was_cut_short_is_made_again(tmp_path):
    pieces = Pieces(tmp_path)
    frame = pd.DataFrame({"x": [0.1, np.nan, np.inf]}, index=pd.Index([3, 1, 2], name="place"))
    frame.attrs = {"residuals": {"0": [1e-7]}}
    pd.testing.assert_frame_equal(pieces.frame("one", lambda: frame), frame)
    pd.testing.assert_frame_equal(pieces.frame("one", lambda: None), frame)
    assert pieces.found == 1
    (tmp_path / "one.part").write_bytes((tmp_path / "one.part").read_bytes()[:100])
    with pytest.warns(UserWarning, match=r"one.part is damaged \(another checksum\)"):
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
    while process.poll() is None and not list(cache.glob("*/needed-0-2.part")):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "a.csv").exists()
    assert list(cache.glob("*/*.part"))
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
