"""The main path on tiny models: what changes no record, what stops a run, what a run says of itself."""

from __future__ import annotations

import copy
import json
import shlex
import threading

import numpy as np
import pandas as pd
import pytest
import tiny
import torch
from architectures import build

import pavinterp as pi
from pavinterp.capture.paths import forward
from pavinterp.cli import main
from pavinterp.errors import UserError
from pavinterp.measures import all_measures
from pavinterp.measuring import measure
from pavinterp.models import untouched
from pavinterp.run import Run
from pavinterp.stimuli import Stimuli
from pavinterp.verification import verify

COLUMNS = [c.name for m in all_measures() for c in m.columns]
FAMILIES = {"gpt2": tiny.gpt2, "llama": tiny.llama, "gemma3": tiny.gemma3}


def documents(count=9, length=48, vocabulary=tiny.VOCABULARY, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocabulary, length) for _ in range(count)]


def stimuli(sequences):
    return Stimuli(
        kind="text",
        tokens=sequences,
        document=np.arange(len(sequences)),
        document_names=[f"document {i}" for i in range(len(sequences))],
        source="made",
        bos="never",
        bos_added=False,
        token_hash="sha256:made",
        dropped_tokens=0,
    )


def run_on(model, sequences, **options):
    return measure(pi.load(model), stimuli(sequences), **({"examples": False, "bos": "never"} | options))


def assert_same_records(one: pd.DataFrame, two: pd.DataFrame, tolerance: float) -> None:
    """`tolerance` is relative; 1e-6 absolute for numbers that are zero but for rounding (interference of one US)."""
    keys = ["stimuli", "sequence", "layer", "head"]
    one, two = (r.sort_values(keys, ignore_index=True) for r in (one, two))
    assert one[keys].astype(str).equals(two[keys].astype(str))
    for column in COLUMNS:
        np.testing.assert_allclose(one[column], two[column], rtol=tolerance, atol=1e-6, err_msg=column)


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_size_and_padding_change_no_record(family):
    sequences = documents(length=40)
    sequences[3] = sequences[3][:25]  # two lengths: in one batch the shorter is padded
    sequences[7] = sequences[7][:33]
    model = FAMILIES[family]()
    alone = run_on(model, sequences, batch=1)
    together = run_on(model, sequences, batch=9)
    assert_same_records(alone.records, together.records, 1e-5)


class Crowded:
    """Says, as an allocator would, that more than so many sequences do not fit into memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.read: list[int] = []

    def __call__(self, module: object, arguments: tuple[torch.Tensor]) -> None:
        rows = arguments[0].shape[0]
        self.read.append(rows)
        if rows > self.most:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"
            )


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_what_does_not_fit_into_memory_is_halved(most):
    model, crowded = FAMILIES["llama"](), Crowded(most)
    expected = run_on(model, documents(length=40), batch=9)
    handle = model.model.embed_tokens.register_forward_pre_hook(crowded)
    with pytest.warns(UserWarning, match="sequences do not fit into memory: going on with"):
        found = run_on(model, documents(length=40), batch=9)
    assert_same_records(found.records, expected.records, 1e-5)
    assert found.records["sequence"].tolist() == expected.records["sequence"].tolist()
    pd.testing.assert_frame_equal(found.details.tests, expected.details.tests, rtol=1e-4)
    assert found.manifest["certificate"]["rows_checked"] == expected.manifest["certificate"]["rows_checked"]
    assert crowded.read.count(9) <= 2  # text and random tokens: tried once, not each time
    crowded.most = 0
    with pytest.raises(RuntimeError, match="can't allocate"):  # the command's line for it names --batch and --context
        run_on(model, documents(length=40), batch=9)
    handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_certifies_every_layer_and_has_every_head(family):
    model = FAMILIES[family]()
    run = run_on(model, documents())
    config = model.config
    assert run.manifest["certificate"]["largest"] <= 1e-5
    assert sorted(map(int, run.manifest["certificate"]["by_layer"])) == list(range(config.num_hidden_layers))
    heads = run.heads()
    assert len(heads) == config.num_hidden_layers * config.num_attention_heads
    assert heads[["effective_load", "d_eff", "induction_score", "previous_token_score"]].notna().all().all()
    assert (heads["effective_load"] >= 1).all()
    assert (heads["effective_load_lo"] <= heads["effective_load"]).all()
    assert (heads["effective_load_hi"] >= heads["effective_load"]).all()


def test_sampled_tests_speak_of_all_positions():
    """Means over sampled tests equal those over all in expectation: 200 seeds of one sequence."""
    model = tiny.gpt2()
    handle = pi.load(model)
    sequence = documents(1, 64)
    everything = measure(handle, stimuli(sequence), tests=None, examples=False, bos="never").records
    exact = everything[everything["stimuli"] == "text"].set_index(["layer", "head"])["sink_strength"]
    drawn = measure(handle, stimuli(sequence * 200), tests=16, examples=False, bos="never", batch=50).records
    drawn = drawn[drawn["stimuli"] == "text"].groupby(["layer", "head"])["sink_strength"]
    error = (drawn.mean() - exact).abs()
    # the ratio estimator's bias is of order 1/tests, far under 4 standard errors of 200 draws
    assert (error <= 4 * drawn.std() / 200**0.5 + 1e-3).all()


def test_one_seed_one_result_and_another_seed_another_sample():
    model, sequences = tiny.llama(), documents()
    first, again, other = (run_on(model, sequences, tests=8, seed=s).records for s in (1, 1, 2))
    assert first.equals(again)
    assert not np.allclose(first["effective_load"], other["effective_load"], equal_nan=True)


def test_only_some_layers_and_layers_that_are_not_there():
    model = tiny.gemma3()
    some = run_on(model, documents(), layers=[2])
    everything = run_on(model, documents())
    assert set(some.records["layer"]) == {2}
    mine = everything.records[everything.records["layer"] == 2].reset_index(drop=True)
    assert_same_records(some.records, mine, 1e-6)
    with pytest.raises(pi.UserError, match=r"layers \[4, 9\]: choose among the attention layers 0 to 3"):
        run_on(model, documents(), layers=[1, 4, 9])


def test_a_live_model_comes_back_as_it_was_after_success_failure_and_interruption():
    model = tiny.gemma3().train()
    model.lm_head.requires_grad_(False)
    hook = model.model.layers[0].register_forward_hook(lambda m, i, o: None)
    weights = {n: p.clone() for n, p in model.state_dict().items()}

    def state():
        return (
            [(n, m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()],
            [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
            [p.requires_grad for p in model.parameters()],
            model.config.to_json_string(),
        )

    before = state()
    run_on(model, documents())
    assert state() == before

    def interrupt(stage, done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_on(model, documents(), progress=interrupt)
    assert state() == before
    with pytest.raises(pi.UserError):
        run_on(model, documents(), layers=[99])
    assert state() == before
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    loss = model(input_ids=torch.tensor(np.stack(documents(1)))).logits.sum()
    loss.backward()  # nothing left behind that autograd cannot use
    hook.remove()


def test_the_run_folder_can_be_read_back(tmp_path):
    run = run_on(tiny.llama(), documents(), examples=True)
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run")
    pd.testing.assert_frame_equal(again.heads(), run.heads())
    assert again.manifest["certificate"] == run.manifest["certificate"]
    assert len(again.details.examples) == len(run.details.examples) > 0
    with pytest.raises(pi.UserError, match="exists"):
        run.save(tmp_path / "run")
    with pytest.raises(pi.UserError, match="not a run folder"):
        Run.load(tmp_path)


def test_a_head_that_writes_nothing_is_named():
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, 8:16] = 0  # head 1 of layer 1
    run = run_on(model, documents())
    assert np.isnan(run.heads().loc[(1, 1), "effective_load"])
    assert run.heads().loc[(1, 1), "regime"] == "undefined"
    assert run.heads().drop(index=(1, 1))["effective_load"].notna().all()
    assert any("1 heads write nothing" in note and "L1H1" in note for note in run.manifest["notes"])


@pytest.mark.parametrize("family", FAMILIES)
def test_verify_says_that_a_model_can_be_measured(family):
    answer = verify(pi.load(FAMILIES[family]()), length=32)
    assert answer["passed"]
    assert answer["future_safe"]
    assert answer["largest"] <= answer["tolerance"] == 1e-5
    assert len(answer["layers"]) == FAMILIES[family]().config.num_hidden_layers


def test_the_certificate_holds_in_the_dtypes_it_promises():
    for dtype in (torch.float64, torch.bfloat16):
        run = run_on(tiny.llama().to(dtype), documents())
        assert run.manifest["certificate"]["largest"] <= run.manifest["certificate"]["tolerance"]
    assert run.manifest["model"]["dtype"] == "bfloat16"


def test_context_beyond_the_positions_is_refused(tmp_path):
    with pytest.raises(pi.UserError, match="context 65 is beyond the 64 positions"):
        measure(pi.load(tiny.gpt2()), [list(range(1, 100))], context=65)


def test_examples_say_what_they_show():
    run = run_on(tiny.gpt2(), documents(), examples=True)
    by_head = {}
    for example in run.details.examples:
        by_head.setdefault((example["layer"], example["head"]), []).append(example)
        assert len(example["tokens"]) == len(example["strengths"])
        assert example["window_start"] + len(example["tokens"]) - 1 == example["position"]
        shares = [a["share"] for a in example["associations"]]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) <= 1 + 1e-6
        assert sum(example["strengths"]) <= 1 + 1e-3
    assert len(by_head) == 8
    assert all(1 <= len(e) <= 4 for e in by_head.values())


def test_half_a_surrogate_pair_is_kept(tmp_path):
    run = run_on(tiny.gpt2(), documents())
    run.details.examples = [{"layer": 0, "head": 0, "tokens": ["\udc80", "é"]}]
    run.save(tmp_path / "run")
    assert Run.load(tmp_path / "run").details.examples == run.details.examples


def test_rotary_frequencies_that_follow_the_length_are_those_of_each_sequence_and_are_given_back():
    """Longrope takes other frequencies beyond 16 tokens: no sequence may get those of a longer one beside it."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    model = build("phi3", rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0, **factors})
    rotary = model.model.rotary_emb
    with torch.no_grad():
        model(torch.arange(3, 11)[None])  # leaves the short frequencies behind, the run ends on long ones
    left_behind, attributes = rotary.inv_freq.clone(), set(vars(rotary))
    sequences = documents(4, 12, 101) + documents(5, 32, 101)
    together = run_on(model, sequences, batch=9)
    alone = [run_on(model, [s] * 2).records for s in sequences]
    for i, records in enumerate(alone):
        one = records[(records["stimuli"] == "text") & (records["sequence"] == 0)]["top_strength"]
        mine = together.records[(together.records["stimuli"] == "text") & (together.records["sequence"] == i)]
        np.testing.assert_allclose(one, mine["top_strength"], rtol=1e-5)
    assert torch.equal(rotary.inv_freq, left_behind)
    assert set(vars(rotary)) == attributes


def test_chunks_are_windows_that_do_not_slide():
    model = build("llama4")
    run = run_on(model, documents(9, 20, 101))
    heads = run.heads()
    assert heads["window"].groupby("layer").first().tolist() == [8, pd.NA]
    crossed = heads.loc[0][["horizon_worst", "horizon_average"]]
    assert ((crossed <= 8) | np.isinf(crossed)).all(axis=None)
    assert (heads.loc[0, "nominal_load"] <= 8).all()


def test_arguments_that_are_none_of_measure():
    model, text = tiny.gpt2(), [np.arange(40)] * 2
    for options, message in [
        ({"tests": 0}, r"tests must be a whole number of at least 1 or None \(every position\), got 0"),
        ({"tests": "all"}, "tests must be a whole number"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"batch": 2.0}, "batch must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"seed": None}, "seed must be a whole number"),
        ({"layers": 0}, "layers must be a list"),
        ({"layers": "0"}, "layers must be a list"),
        ({"layers": [0.5]}, "each of layers must be a whole number"),
        ({"bos": True}, "bos must be one of"),
        ({"context": "64"}, "context must be a whole number"),
        ({"context": 7}, "context must be a whole number of at least 8, got 7"),
        ({"sequences": 1.5}, "sequences must be a whole number"),
        ({"progress": 5}, "progress must be a function"),
    ]:
        with pytest.raises(pi.UserError, match=message):
            measure(pi.load(model), text, **options)
    with pytest.raises(pi.UserError, match="with ready Stimuli"):
        run_on(model, text, context=16)
    with pytest.raises(pi.UserError, match=r"sequence 1 of the stimuli: token id 300 at position 0"):
        run_on(model, [np.arange(40), np.full(40, tiny.VOCABULARY)])
    with pytest.raises(pi.UserError, match="has 64 positions"):
        run_on(model, [np.zeros(65, int)])


def test_the_command_of_a_run_from_python_makes_it_again(tmp_path, monkeypatch):
    folder = tiny.model_folder(tmp_path / "tiny gpt2")
    rows = "\n".join(json.dumps({"body": " ".join(tiny.TEXT)}) for _ in range(3))
    (tmp_path / "text.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    handle = pi.load(folder, dtype="float64", device="cpu", tokenizer=str(folder))
    text = pi.corpus("text.jsonl", text_field="body", max_documents=2)
    run = measure(handle, text, context=24, sequences=3, tests=5, layers=[1], seed=3, batch=2, bos="always")
    words = shlex.split(run.manifest["command"])
    assert words[:2] == ["pavinterp", "report"]
    with pytest.raises(SystemExit) as end:
        main(["measure", *words[2:], "--out", "again", "--quiet"])
    assert end.value.code == 0
    again = pi.Run.load("again")
    assert again.records.astype({"stimuli": str}).equals(run.records.astype({"stimuli": str}))
    assert again.manifest["arguments"] == run.manifest["arguments"]


def test_a_run_on_what_is_in_memory_says_which_call_made_it():
    run = measure(tiny.gpt2(), [np.arange(40)] * 2, context=16, tests=None, layers=[1], examples=False)
    assert run.manifest["command"] == (
        "pi.measure(<GPT2LMHeadModel in memory>, <token ids in memory>, context=16, sequences=4, layers=[1], "
        "tests=None, seed=0)"
    )


def test_a_model_with_fewer_positions_than_a_sequence_needs():
    with pytest.raises(pi.UserError, match="has 4 positions; a sequence needs at least 8"):
        measure(pi.load(tiny.gpt2(positions=4)), [np.arange(40)] * 2)


def test_documents_that_are_too_short_are_noted():
    run = measure(pi.load(tiny.gpt2()), [np.arange(40), np.arange(5), np.arange(6)], context=16, examples=False)
    assert "2 documents of those read are shorter than one sequence and left out." in run.manifest["notes"]
    assert (
        "(all of one document)"
        in measure(pi.load(tiny.gpt2()), [np.arange(200), np.arange(5)], context=16, examples=False).manifest[
            "intervals"
        ]
    )


def test_models_that_share_a_configuration_wait_for_each_other():
    one, two = tiny.llama(0), tiny.llama(1)
    for module in two.modules():
        if hasattr(module, "config"):
            module.config = one.config
    with untouched(one):
        waiting = threading.Thread(target=lambda: run_on(two, documents(2, 20)), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()
    assert one.config._attn_implementation == "sdpa"


def test_a_layer_that_runs_twice_is_refused():
    model = tiny.llama()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(UserError, match="layer 0 was called twice in one forward pass"):
        run_on(model, documents(2, 20))


def test_layers_that_bear_one_number_are_told_apart_or_refused():
    model = tiny.llama()
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))  # depth up-scaling leaves layer_idx as it was
    model.config.num_hidden_layers = 3
    with pytest.raises(UserError, match=r"two attention modules .* layer 1"):
        run_on(model, documents(2, 20), capture="attention_interface")
    run = run_on(model, documents(2, 20))
    assert run.manifest["model"]["path"] == "transformer_lens"  # which goes by the blocks
    assert len(run.heads()) == 12


def test_a_window_of_one_position_has_no_pairs():
    heads = run_on(build("mistral", sliding_window=1), documents(9, 20, 101)).heads()
    assert (heads["effective_load"] == 1).all()
    assert heads[["d_eff", "d_eff_query"]].isna().all(axis=None)


def test_what_overflows_is_named():
    model = tiny.llama()
    model.model.layers[1].self_attn.v_proj.weight.data *= 1e20
    with pytest.raises(UserError, match=r"layer 1 head \d writes more than float32 holds"):
        run_on(model, documents(2, 20))


def test_the_final_norm_of_a_model_whose_prefix_names_nothing():
    model = build("llama4")
    run = run_on(model, documents(2, 20, 101))
    assert not any("No norm was found" in note for note in run.manifest["notes"])
    assert forward(pi.load(model), torch.arange(3, 9)[None]).shape == (1, 6, 32)


def test_layers_of_any_kind_of_list():
    runs = [run_on(tiny.llama(), documents(2, 20), layers=layers) for layers in ([1], np.array([1]), iter([1]))]
    assert [run.manifest["arguments"]["layers"] for run in runs] == [[1]] * 3


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("tests.parquet", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("spectra.parquet", lambda path: path.write_bytes(b"")),
        ("examples.json", lambda path: path.write_text("[{")),
        ("records.parquet", lambda path: pd.read_parquet(path).iloc[:-1].to_parquet(path)),
        ("records.parquet", lambda path: pd.read_parquet(path).drop(columns="document").to_parquet(path)),
        ("manifest.json", lambda path: path.write_text('{"pavinterp_version": "0.1.0"}')),
        ("manifest.json", lambda path: path.write_text("[" * 100_000)),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"kv_heads"', '"kv"'))),
    ],
)
def test_a_damaged_run_folder_is_named(tmp_path, name, spoil):
    folder = run_on(tiny.llama(), documents(2, 20)).save(tmp_path / "run")
    spoil(folder / name)
    with pytest.raises(UserError, match=rf"{name} cannot be read \(.*\); measure again"):
        Run.load(folder)
