"""Redundancy of heads: copies and closed forms, what adds up exactly, plain loops, every family, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from architectures import ROWS, build
from test_run import stimuli

import pavinterp as pi
from pavinterp import cli
from pavinterp.errors import UserError
from pavinterp.experiments.ablations import ablated_losses, responses
from pavinterp.experiments.group_effects import partners
from pavinterp.experiments.head_clusters import clusters, groups_of, silhouette
from pavinterp.experiments.head_writes import layer_writes, unit_of
from pavinterp.experiments.redundancy_tables import Alike, Effects, control_table, within
from pavinterp.experiments.resampling import spearman
from pavinterp.models import untouched
from pavinterp.sweep import inspect
from pavinterp.theory.similarity import cka, distinct

LENGTH = 20
DOCUMENTS = [np.random.default_rng(i).integers(3, 101, LENGTH) for i in range(9)]
TEXT, TOKENS = stimuli(DOCUMENTS), torch.from_numpy(DOCUMENTS[0])
SMALL = {"pairs": 3, "progress": False}


def twins(scale=1.0, sign=1):
    """A Llama whose layer 1 has heads 0 and 1 (of one KV head) alike in every weight; all of its writes scaled.

    `sign`: -1 makes the second write the opposite.
    """
    model = build("llama")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        attention.q_proj.weight[8:16] = attention.q_proj.weight[:8]
        attention.o_proj.weight[:, 8:16] = sign * attention.o_proj.weight[:, :8]
        attention.o_proj.weight *= scale
    return model


# --- Similarity ---


def test_a_copied_head_is_alike_in_every_way():
    found = pi.head_redundancy(twins(), TEXT, layers=[1], **SMALL)
    pair = found.pairs.loc[(1, 0, 1)]
    for name in ("cka", "alignment", "overlap", "cka_lo", "cka_hi", "alignment_lo", "alignment_hi"):
        assert pair[name] == pytest.approx(1, abs=1e-5)  # float32 responses
    assert pair["one_cluster"]
    assert (found.pairs.drop((1, 0, 1))["cka"] < 0.9).all()
    assert found.heads.loc[(1, 0), "nearest"] == 1
    # four heads of which two are one: fewer than three and a half of them are distinct
    assert found.layers.loc[1, "distinct"] < 3.5
    assert found.heads.loc[(1, 0), "cluster"] == "L01: H0+H1"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_writes_in_few_coordinates_are_those_in_the_residual_stream(name):
    """By a hook of one's own and the output projection's weights, in the full width and plain formulas."""
    model = build(name)
    handle, seen = pi.load(model), []
    projection = model.model.layers[1].self_attn.o_proj if name == "llama" else model.transformer.h[1].attn.c_proj
    weight = projection.weight.detach() if name == "gpt2" else projection.weight.detach().T
    with untouched(model):
        (got,) = layer_writes(handle, TEXT, inspect(handle)[1:], tests=None, seed=0, stage=lambda *_: None)
        hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
        for ids in DOCUMENTS:
            model(input_ids=torch.from_numpy(ids)[None])
        hook.remove()
    writes = [
        torch.stack([x[:, 8 * h : 8 * h + 8] @ weight[8 * h : 8 * h + 8] for h in range(4)], dim=1).detach().numpy()
        for x in seen
    ]
    once = np.ones((1, 9))
    np.testing.assert_allclose(got.cka(once), cka(writes), rtol=1e-4, atol=1e-5)
    every = np.concatenate(writes).astype(np.float64)  # [positions, heads, width], documents of one length
    about = every - every.mean(0)
    products = np.einsum("nhd,ngd->hg", about, about)
    own = np.sqrt(np.diag(products))
    np.testing.assert_allclose(got.alignment(once)[0], products / own / own[:, None], rtol=1e-4, atol=1e-5)
    images = [np.linalg.qr(weight[8 * h : 8 * h + 8].numpy().T)[0] for h in range(4)]
    expected = [[np.square(a.T @ b).sum() / 8 for a in images] for b in images]
    np.testing.assert_allclose(got.overlap()[0], expected, rtol=1e-4)
    assert got.overlap()[1][0, 1] == 8 / 32


def test_sampled_positions_speak_of_all(monkeypatch):
    handle = pi.load(build("llama"))
    shapes = inspect(handle)
    with untouched(handle.model):
        whole = list(layer_writes(handle, TEXT, shapes, tests=None, seed=0, stage=lambda *_: None))
        draws = [
            [w.cka(np.ones((1, 9)))[0] for w in layer_writes(handle, TEXT, shapes, tests=10, seed=i, stage=print)]
            for i in range(12)
        ]
        monkeypatch.setattr("pavinterp.experiments.head_writes.HELD_BYTES", 1)  # a pass for each layer
        again = list(layer_writes(handle, TEXT, shapes, tests=None, seed=0, stage=lambda *_: None))
    for i, writes in enumerate(whole):
        assert writes.units[0].shape == (LENGTH, 4, 8)
        exact = writes.cka(np.ones((1, 9)))[0]
        mean, error = np.mean([d[i] for d in draws], 0), np.std([d[i] for d in draws], 0)
        assert (np.abs(mean - exact) <= error + 1e-6).all()  # of one draw: the mean of twelve is nearer by far
        np.testing.assert_array_equal(again[i].units[3], writes.units[3])


# --- Ablation ---


def test_effects_at_different_positions_add_up_exactly():
    """In the last layer a position's prediction hangs on its own write alone: two heads that change other positions."""
    handle = pi.load(build("llama"))
    with untouched(handle.model):
        own, other = (responses(handle, ids, [(1, 0), (1, 3)]) for ids in DOCUMENTS[:2])
        early = torch.arange(LENGTH)[:, None] < 9
        replacement = {
            (1, 0): torch.where(early, other[1, 0], own[1, 0]),
            (1, 3): torch.where(early, own[1, 3], other[1, 3]),
        }
        frame = ablated_losses(handle, TOKENS, [[(1, 0)], [(1, 3)], [(1, 0), (1, 3)]], replacement)
    one, two, both = frame[["loss_change", "divergence"]].to_numpy()
    assert (np.abs(one) > 1e-3).all()
    assert (np.abs(two) > 1e-3).all()
    np.testing.assert_allclose(both - one - two, 0, atol=1e-6)


def test_small_copies_interact_as_a_quadratic_form_says():
    """D(2 x) = 4 D(x): the index is 2 D, interaction 1, and the loss adds up to first order, as the size goes to 0."""
    found = {}
    for scale in (0.02, 0.01):
        result = pi.head_redundancy(twins(scale), TEXT, layers=[1], pairs=6, progress=False)
        found[scale] = result.pairs.loc[(1, 0, 1)], result.heads.loc[(1, 0)]
    for pair, _ in found.values():
        assert pair["mean_interaction"] == pytest.approx(1, abs=0.03)
        assert pair["resampling_interaction"] == pytest.approx(1, abs=0.03)
    pair, half = (found[scale][0]["mean_loss_index"] for scale in (0.02, 0.01))
    assert pair / half == pytest.approx(4, rel=0.15)  # of second order
    effect, of_half = (found[scale][1]["mean_ablation_loss_change"] for scale in (0.02, 0.01))
    assert effect / of_half == pytest.approx(2, rel=0.15)  # of first order


def test_heads_that_cancel_are_alike_and_have_an_index_below_zero():
    """x and -x: without both nothing changes, so the index is less both single effects; small ones interact at -1."""
    found = pi.head_redundancy(twins(sign=-1), TEXT, layers=[1], pairs=6, progress=False)
    pair = found.pairs.loc[(1, 0, 1)]
    assert pair["cka"] == pytest.approx(1, abs=1e-5)
    assert pair["alignment"] == pytest.approx(-1, abs=1e-5)
    for ablation in ("mean", "resampling"):
        singles = found.heads.loc[[(1, 0), (1, 1)], f"{ablation}_ablation_divergence"]
        assert pair[f"{ablation}_divergence_index"] == pytest.approx(-singles.sum(), rel=1e-3)
        assert singles.min() > 1e-4
        assert pair[f"{ablation}_loss_index"] == pytest.approx(
            -found.heads.loc[[(1, 0), (1, 1)], f"{ablation}_ablation_loss_change"].sum(), abs=1e-5
        )
    small = pi.head_redundancy(twins(0.02, sign=-1), TEXT, layers=[1], pairs=6, progress=False)
    assert small.pairs.loc[(1, 0, 1), "mean_interaction"] == pytest.approx(-1, abs=0.03)


def test_heads_that_saturate_stand_in_for_each_other():
    """Two copies whose write drowns all else under the final norm: either is enough, both gone is the embedding."""
    model = build("llama", num_hidden_layers=1)
    attention, block = model.model.layers[0].self_attn, model.model.layers[0]
    with torch.no_grad():
        attention.q_proj.weight[8:16] = attention.q_proj.weight[:8]
        attention.o_proj.weight[:, 16:] = 0
        attention.o_proj.weight[:, 8:16] = attention.o_proj.weight[:, :8]
        attention.o_proj.weight *= 1e5
        block.mlp.down_proj.weight.zero_()
        logits = model.lm_head(model.model.norm(model.model.embed_tokens(TOKENS)))
        without = F.cross_entropy(logits[:-1].double(), TOKENS[1:])
    nothing = {(0, head): torch.zeros(1, 8) for head in range(2)}
    handle = pi.load(model)
    with untouched(model):
        frame = ablated_losses(handle, TOKENS, [[], [(0, 0)], [(0, 1)], [(0, 0), (0, 1)]], nothing)
    loss = frame["loss"]
    assert loss[3] == pytest.approx(float(without), rel=1e-5)
    np.testing.assert_allclose(frame["loss_change"][:3], 0, atol=1e-4)
    change = frame["loss_change"]
    assert change[3] - change[1] - change[2] == pytest.approx(float(without) - loss[0], abs=3e-4)
    assert abs(float(without) - loss[0]) > 0.1


def effects_of(singles, groups):
    """Effects by hand: `singles[h]` of head h, `groups["0+1"]` of a group, in layer 0, both ablations and outcomes."""
    rows = {(0, str(h)): x for h, x in enumerate(singles)} | {(0, name): x for name, x in groups.items()}
    table = pd.DataFrame({0: rows})
    table.index = pd.MultiIndex.from_tuples(list(rows))
    pairs = [(a, w) for a in ("mean", "resampling") for w in ("loss_change", "divergence")]
    return Effects(dict.fromkeys(pairs, table), 1e-9)


def test_the_index_is_the_excess_over_single_effects():
    effects = effects_of([0.2, 0.1, 0.0], {"0+1": 0.5, "0+1+2": 0.7, "0+2": 0.3})
    assert effects.index("mean", "loss_index", 0, (0, 1))[0] == pytest.approx(0.2)
    assert effects.index("mean", "divergence_index", 0, (0, 1, 2))[0] == pytest.approx(0.4)
    assert effects.index("resampling", "interaction", 0, (0, 1))[0] == pytest.approx(0.2 / (2 * np.sqrt(0.02)))
    assert np.isnan(effects.index("mean", "interaction", 0, (0, 2))[0])
    for head in range(3):
        assert effects.index("mean", "loss_index", 0, (head,))[0] == 0


def test_clusters_are_set_against_their_own_controls():
    similar = np.eye(6) * 0.5 + 0.1
    similar[:3, :3] = 0.9
    found = clusters(similar)
    assert found.members == [(0, 1, 2), (3,), (4,), (5,)]
    groups = groups_of(found, 6, np.random.default_rng(0))
    controls = [group.heads for group in groups if group.kind == "control"]
    assert len(controls) == 4
    assert (0, 1, 2) not in controls
    values = {"+".join(map(str, heads)): 1.0 + i for i, heads in enumerate(controls)} | {"0+1+2": 12.0}
    one = Alike(similar[None], similar[None], similar, similar, found, groups)
    got = control_table({0: one}, effects_of([0.5] * 6, values)).loc[("mean", "loss_index")]
    assert got["cluster_index"] == pytest.approx((12.0 - 1.5) / 3)  # of three pairs
    assert got["control_index"] == pytest.approx((2.5 - 1.5) / 3)
    assert got["difference"] == pytest.approx(9.5 / 3)
    assert got["clusters"] == 1


# --- Clusters and groups ---


def test_clusters_are_those_that_were_put_in():
    truth = np.array([0, 1, 0, 2, 1, 2, 0, 3])
    rng = np.random.default_rng(0)
    similar = np.where(truth[:, None] == truth, 0.8, 0.1) + 0.02 * rng.normal(size=(8, 8))
    similar = (similar + similar.T) / 2
    np.fill_diagonal(similar, 1)
    for cut in (None, 0.5):
        found = clusters(similar, cut)
        assert found.labels.tolist() == truth.tolist()
        assert 0.1 < found.cut < 0.8
    # by hand: a is about 0.2, b about 0.9, so (b - a) / b; nothing for the head that is alone
    assert found.silhouette == pytest.approx(7 / 8 * 0.7 / 0.9, abs=0.02)
    assert clusters(similar, 0.95).members == [(h,) for h in range(8)]
    assert clusters(similar, 0.0).members == [tuple(range(8))]


def test_no_cluster_is_most_of_a_layer_and_few_heads_are_none():
    similar = np.full((6, 6), 0.9)
    similar[5] = similar[:, 5] = 0.0
    np.fill_diagonal(similar, 1)
    assert max(map(len, clusters(similar).members)) <= 3
    assert clusters(np.ones((1, 1))).members == [(0,)]
    assert clusters(np.ones((2, 2))).members == [(0,), (1,)]
    assert clusters(np.ones((2, 2)), 0.5).members == [(0, 1)]
    unknown = np.full((4, 4), np.nan)
    unknown[:3, :3] = np.where(np.eye(3) > 0, 1, 0.8)
    assert clusters(unknown, 0.5).members == [(0, 1, 2), (3,)]
    assert np.isnan(silhouette(1 - np.eye(3), np.arange(3)))


def test_half_of_the_pairs_are_within_clusters_where_there_are_so_many():
    similar = np.kron(np.eye(2), np.ones((4, 4)))
    found = clusters(similar)
    groups = groups_of(found, 6, np.random.default_rng(0))
    pairs = [group for group in groups if group.kind == "pair"]
    assert [bool(group.of) for group in pairs] == [True] * 3 + [False] * 3
    assert len({group.heads for group in pairs}) == 6
    every = [group for group in groups_of(found, 99, np.random.default_rng(0)) if group.kind == "pair"]
    assert len(every) == 28
    assert [group.heads for group in groups if group.kind == "layer"] == [tuple(range(8))]
    assert not [group for group in groups_of(clusters(np.eye(1)), 9, np.random.default_rng(0)) if group.kind != "head"]


def test_partners_are_of_other_documents():
    unit = np.array([0, 0, 1, 2, 1, 3])
    drawn = np.stack([partners(unit, np.random.default_rng(i)) for i in range(50)])
    assert (unit[drawn] != unit).all()
    assert set(drawn[:, 0]) == {2, 3, 4, 5}


def test_sequences_of_one_document_are_one_unit():
    several = replace(TEXT, document=np.array([0, 0, 1, 2, 1, 3, 3, 3, 4]))
    assert unit_of(several).tolist() == [0, 0, 1, 2, 1, 3, 3, 3, 4]
    assert unit_of(replace(TEXT, document=np.zeros(9, np.int64))).tolist() == list(range(9))
    handle = pi.load(build("llama"))
    with untouched(handle.model):
        shapes = inspect(handle)[:1]
        alone, together = (
            next(layer_writes(handle, text, shapes, tests=None, seed=0, stage=lambda *_: None))
            for text in (TEXT, several)
        )
    assert [len(unit) for unit in together.units] == [40, 40, 20, 60, 20]
    np.testing.assert_array_equal(together.units[1], np.concatenate([alone.units[2], alone.units[4]]))
    found = pi.head_redundancy(handle, several, layers=[0], **SMALL)
    assert found.pairs.loc[(0, 0, 1), "cka"] == pytest.approx(cka(together.units)[0, 0, 1])
    assert np.isnan(found.pairs.loc[(0, 0, 1), "cka_lo"])  # five documents: no interval
    with pytest.raises(UserError, match="at least 4 documents, and the text read has 2"):
        pi.head_redundancy(handle, replace(TEXT, document=np.array([0] * 5 + [1] * 4)), progress=False)


def test_ranks_within_layers_know_nothing_of_differences_between_them():
    layers = np.repeat([0, 1], 6)
    x = np.tile(np.arange(6.0), 2)[:, None] + 100 * layers[:, None]
    y = -np.tile(np.arange(6.0), 2)[:, None] + 100 * layers[:, None]
    assert spearman(x, y)[0] > 0.3
    assert within(x, y, layers)[0][0] == pytest.approx(-1)
    assert within(x, y, layers)[1] == 12
    assert np.isnan(within(x[:3], y[:3], layers[:3])[0][0])


# --- From a model to its tables ---


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next", "deepseek_v3", "gemma3n", "mistral", "bloom"])
def test_every_family_is_measured(name):
    """Grouped queries, sinks, gates, d_k other than d_v, shared keys, windows, hooks of a bridge."""
    layer = ROWS[name].layers[-1]
    found = pi.head_redundancy(build(name), TEXT, layers=[layer], **SMALL)
    assert 1 <= found.layers.loc[layer, "distinct"] <= 4
    assert found.layers.loc[layer, "distinct_lo"] <= found.layers.loc[layer, "distinct_hi"]
    assert found.pairs["cka"].between(-0.2, 1 + 1e-6).all()
    assert found.pairs["ablated"].sum() == 3
    assert found.pairs.loc[found.pairs["ablated"], "mean_divergence_index"].notna().all()
    assert np.isfinite(found.effects[["loss", "loss_change", "divergence"]]).all(axis=None)
    assert (found.heads["resampling_ablation_divergence"] > 0).all()


def test_both_capture_paths_agree():
    one, two = (
        pi.head_redundancy(build("gpt2"), TEXT, capture=capture, **SMALL)
        for capture in ("attention_interface", "transformer_lens")
    )
    for table in ("heads", "layers", "total", "pairs", "groups", "control"):
        mine, theirs = (getattr(found, table).select_dtypes("number") for found in (one, two))
        # the interaction is a quotient of numbers of 1e-4 nats, each exact to 1e-6
        rough = [column for column in mine if "interaction" in str(column)]
        np.testing.assert_allclose(mine.drop(columns=rough), theirs.drop(columns=rough), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(mine[rough], theirs[rough], rtol=1e-2, atol=1e-2)


def test_tables_are_of_one_another():
    found = pi.head_redundancy(build("llama"), TEXT, **SMALL)
    matrix = np.eye(4)
    for (_, head, other), row in found.pairs.loc[[1]].iterrows():
        matrix[head, other] = matrix[other, head] = row["cka"]
    assert found.layers.loc[1, "distinct"] == pytest.approx(distinct(matrix))
    assert found.total["distinct"].item() == pytest.approx(found.layers["distinct"].sum())
    assert found.heads.loc[(1, 2), "similarity"] == pytest.approx((matrix[2].sum() - 1) / 3)
    pairs = found.groups.query("kind == 'pair' and ablation == 'resampling' and layer == 1")
    means = found.effects.groupby(["layer", "ablation", "members"])[["loss_change", "divergence"]].mean()
    for row in pairs.to_dict("records"):
        heads = row["name"].removeprefix("L01: ").replace("H", "")
        singles = [means.loc[(1, "resampling", head)] for head in heads.split("+")]
        together = means.loc[(1, "resampling", heads)]
        assert row["loss_index"] == pytest.approx(together["loss_change"] - sum(s["loss_change"] for s in singles))
        assert row["divergence_lo"] < row["divergence"] < row["divergence_hi"]
        pair = found.pairs.loc[(1, *map(int, heads.split("+")))]
        assert [row["cka"], row["alignment"]] == [pair["cka"], pair["alignment"]]
        assert row["loss_index"] == pair["resampling_loss_index"]
    assert found.pairs.attrs["units"]["resampling_loss_index"] == "nats per token"
    assert found.heads.attrs["units"]["mean_ablation_divergence"] == "nats"
    assert "effective number" in found.layers.attrs["descriptions"]["distinct"].lower()
    numbers = found.experiment()
    assert list(numbers.numbers) == [
        f"{n}{e}" for n in ("head_similarity", "ablation_loss") for e in ("", "_lo", "_hi")
    ]
    json.dumps(found.manifest)


def test_layers_that_are_not_ablated_and_no_pairs_at_all():
    found = pi.head_redundancy(build("llama"), TEXT, ablated_layers=1, pairs=0, progress=False)
    assert found.heads["mean_ablation_divergence"].notna().groupby(level="layer").all().tolist() == [False, True]
    assert found.layers["distinct"].notna().all()
    assert not found.pairs["ablated"].any()
    assert len(found.correlations) == 0
    found = pi.head_redundancy(build("llama"), TEXT, ablated_layers=0, progress=False)
    assert found.heads["mean_ablation_divergence"].isna().all()
    assert len(found.groups) == len(found.effects) == 0


def test_a_head_that_writes_nothing_is_like_no_other():
    model = build("llama")
    model.model.layers[1].self_attn.o_proj.weight.data[:, 8:16] = 0
    found = pi.head_redundancy(model, TEXT, layers=[1], pairs=6, progress=False)
    assert found.pairs.loc[[(1, 0, 1), (1, 1, 2)], ["cka", "alignment", "overlap"]].isna().all(axis=None)
    assert found.heads.loc[(1, 1), "cluster"] == ""
    assert found.heads.loc[(1, 1), "nearest"] == -1
    assert found.layers.loc[1, "distinct"] <= 3
    assert found.heads.loc[(1, 1), "mean_ablation_divergence"] == 0
    assert np.isfinite(found.layers.loc[1, "similarity"])


def test_mistakes_are_named():
    model = build("llama")
    for given, said in (
        ({"corpus": stimuli(DOCUMENTS[:3])}, "over at least 4 documents, and the text read has 3"),
        ({"corpus": stimuli([*DOCUMENTS, DOCUMENTS[0][:9]])}, "sequences of one length"),
        ({"cut": 1.5}, "cut is a CKA from 0 to 1"),
        ({"pairs": -1}, "pairs"),
        ({"tests": 0}, "tests"),
    ):
        with pytest.raises(UserError, match=said):
            pi.head_redundancy(model, **({"corpus": TEXT, "progress": False} | given))


def test_the_command(capsys, tmp_path):
    small = ["--context", "16", "--sequences", "8", "--layers", "0,1", "--pairs", "4", "--ablated-layers", "1"]
    with pytest.raises(SystemExit) as end:
        cli.main(["redundancy", "demo", *small, "--csv", str(tmp_path / "heads.csv")])
    assert end.value.code in (0, None)
    out = capsys.readouterr().out
    assert "distinct heads" in out
    assert "rank correlation over pairs" in out
    assert "L01: H" in out
    table = pd.read_csv(tmp_path / "heads.csv", index_col=["layer", "head"])
    assert len(table) == 16
    with pytest.raises(SystemExit):
        cli.main(["redundancy", "demo", *small, "--json", "--cut", "0.3", "--tests", "all"])
    told = json.loads(capsys.readouterr().out)
    assert told["arguments"]["cut"] == 0.3
    assert told["arguments"]["tests"] == "all"
    assert {"heads", "layers", "total", "pairs", "groups", "control", "correlations"} <= set(told)
