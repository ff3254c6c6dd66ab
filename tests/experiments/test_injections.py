"""What is injected: real interference of the layer at other positions, or isotropic noise, of the size that is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ROWS, build

import pavinterp as pi
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.experiments.gains import drawn
from pavinterp.experiments.injections import KINDS, Source, Weights, perturbation, sources
from pavinterp.models import untouched

TOKENS = torch.from_numpy(np.random.default_rng(0).integers(3, 101, (1, 24)))


def sources_of(name, capture="auto"):
    handle = on_path(pi.load(build(name)), capture)
    with untouched(handle.model):
        return sources(handle, TOKENS, ROWS[name].layers, Weights.none_yet())


def test_interference_is_what_a_plain_loop_leaves_of_the_response():
    """Llama with eager attention, head by head and test by test, from its own strengths and values."""
    model = build("llama")
    attention, heads, width = model.model.layers[1].self_attn, 4, 8
    seen = {}
    hooks = [
        attention.v_proj.register_forward_hook(lambda m, i, o: seen.__setitem__("values", o[0])),
        attention.o_proj.register_forward_hook(lambda m, i, o: seen.__setitem__("response", i[0][0])),
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        strengths = model(TOKENS, output_attentions=True).attentions[1][0]
    for hook in hooks:
        hook.remove()
    write = attention.o_proj.weight.detach().T
    expected = seen["response"].clone()
    for head in range(heads):
        block = write[head * width : (head + 1) * width]
        values = seen["values"][:, (head // 2) * width : (head // 2 + 1) * width]
        for t in range(24):
            parts = [(float(strengths[head, t, j] * (values[j] @ block).norm()), j) for j in range(24)]
            j = max(parts)[1]
            expected[t, head * width : (head + 1) * width] -= strengths[head, t, j] * values[j]
    got = sources_of("llama")[1]
    torch.testing.assert_close(got.interference, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.size, (seen["response"] @ write).norm(dim=-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon", "qwen3_next", "gpt_oss", "deepseek_v2", "gemma4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_perturbation_writes_as_much_as_the_layer_does(name, kind):
    for source in sources_of(name).values():
        delta = perturbation(source, kind, np.random.default_rng(0))
        torch.testing.assert_close((delta @ source.write).norm(dim=-1), source.size, rtol=1e-3, atol=1e-6)


def test_interference_comes_from_another_position_with_either_sign():
    source = sources_of("llama")[1]
    directions = torch.nn.functional.normalize(source.interference @ source.write, dim=-1)
    places, signs = [], []
    for draw in range(20):
        written = torch.nn.functional.normalize(drawn(source, "interference", 0, 0, draw) @ source.write, dim=-1)
        cosines = written @ directions.T
        best = cosines.abs().argmax(-1)
        at = cosines[torch.arange(24), best]
        assert (at.abs() > 1 - 1e-4).all()  # one position's interference and nothing else
        assert (best != torch.arange(24)).all()
        places += best.tolist()
        signs += at.sign().tolist()
    assert set(places) == set(range(1, 24))  # the first test sees one association: it has none
    assert abs(np.mean(signs)) < 4 / np.sqrt(len(signs))  # four standard errors


def test_isotropic_noise_has_no_preferred_direction_in_what_the_layer_can_write():
    rng = torch.Generator().manual_seed(0)
    n, features, width = 4000, 5, 8
    write = torch.randn(features, width, generator=rng, dtype=torch.float64) * torch.tensor([[9.0], [3], [1], [1], [1]])
    source = Source(0, torch.zeros(n, features), torch.ones(n, dtype=torch.float64), write, torch.linalg.pinv(write))
    written = perturbation(source, "isotropic", np.random.default_rng(0)) @ write
    within = torch.linalg.svd(write, full_matrices=False).Vh
    second = (written @ within.T).T @ (written @ within.T) / n  # of unit vectors in 5 dimensions: 1/5 of the identity
    torch.testing.assert_close(second, torch.eye(features, dtype=torch.float64) / features, rtol=0, atol=0.02)
    torch.testing.assert_close(written @ within.T @ within, written, rtol=0, atol=1e-9)


def test_draws_are_the_same_when_asked_again_and_differ_otherwise():
    source = sources_of("llama")[0]
    one = drawn(source, "isotropic", 0, 0, 0)
    assert torch.equal(one, drawn(source, "isotropic", 0, 0, 0))
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert not torch.allclose(one, drawn(source, "isotropic", *other))


def test_both_capture_paths_find_the_same_interference():
    for layer, one in sources_of("llama").items():
        other = sources_of("llama", "transformer_lens")[layer]
        torch.testing.assert_close(one.interference, other.interference, rtol=1e-4, atol=1e-5)


def test_a_layer_without_interference_is_named():
    model = build("llama")
    model.model.layers[1].self_attn.v_proj.weight.data.zero_()
    handle = pi.load(model)
    with untouched(model), pytest.raises(UserError, match="layer 1: no response has interference"):
        sources(handle, TOKENS, {1}, Weights.none_yet())
