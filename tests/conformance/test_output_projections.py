"""The output projection: one that is no matrix is refused, and hooks on one that is are counted once."""

from __future__ import annotations

import pytest
import torch
from formats import assert_same_records, build, measured
from test_formats_adapters import with_adapters

from pavinterp.errors import UserError

FACTORS = torch.linspace(0.2, 3, 32)


class Normed(torch.nn.Linear):
    """As in models of ternary weights, whose layers normalise what they receive."""

    def forward(self, x):
        return super().forward(torch.nn.functional.rms_norm(x, x.shape[-1:]))


class Clamped(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).clamp(-0.1, 0.1)


class Halved(torch.nn.Linear):
    """Another matrix than its weight."""

    def forward(self, x):
        return 0.5 * super().forward(x)


class OfSequences(torch.nn.Linear):
    """Takes [batch, n, features] and nothing else."""

    def forward(self, x):
        batch, n, _ = x.shape
        return super().forward(x.reshape(batch * n, -1)).reshape(batch, n, -1)


def with_projection(kind):
    model = build("llama")
    attention = model.model.layers[1].self_attn
    made = kind(32, 32, bias=attention.o_proj.bias is not None)
    made.load_state_dict(attention.o_proj.state_dict())
    attention.o_proj = made
    return model


def response_norms(model):
    return measured(model).records.query("stimuli == 'text' and layer == 1")["response_norm"].to_numpy()


@pytest.mark.parametrize("kind", [Normed, Clamped])
def test_a_projection_that_is_not_linear_is_refused(kind):
    with pytest.raises(UserError, match=rf"layer 1: the output projection \({kind.__name__}\) is not linear .*differs"):
        measured(with_projection(kind))


def test_a_plain_layer_whose_forward_was_replaced_is_refused():
    model = build("llama")
    projection = model.model.layers[1].self_attn.o_proj
    projection.forward = lambda x: torch.nn.functional.linear(x.tanh(), projection.weight)
    with pytest.raises(UserError, match=r"layer 1: the output projection \(Linear\) is not linear"):
        measured(model)


def test_a_plain_layer_that_is_a_little_more_than_its_weight_is_refused():
    """One weak head ablated inside `forward`, or 4 % on everything: no rounding explains it."""
    without_head_1 = torch.ones(32).index_fill_(0, torch.arange(8, 16), 0.0)
    for change in (lambda x: 1.04 * x, lambda x: x * without_head_1):
        model = build("llama")
        projection = model.model.layers[1].self_attn.o_proj
        with torch.no_grad():
            projection.weight[:, 8:16] *= 0.02
        projection.forward = lambda x, p=projection, c=change: torch.nn.functional.linear(c(x), p.weight)
        with pytest.raises(UserError, match=r"the output projection \(Linear\) is not linear"):
            measured(model)


def test_a_layer_that_is_another_in_larger_batches_is_refused():
    class Moody(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.tanh() if len(x) > 1 else x)

    with pytest.raises(UserError, match=r"the output projection \(Moody\) is not linear"):
        measured(with_projection(Moody))


def test_the_matrix_is_what_the_module_does():
    plain = response_norms(build("llama"))
    assert response_norms(with_projection(Halved)) == pytest.approx(plain / 2, rel=1e-5)
    assert response_norms(with_projection(OfSequences)) == pytest.approx(plain, rel=1e-5)


def test_hooks_before_a_projection_whose_matrix_is_read_off_are_counted_once():
    """The same factors before an adapted projection and before the one that it merges into."""
    adapted, merged = with_adapters("llama"), with_adapters("llama").merge_and_unload()
    for model in (adapted.get_base_model(), merged):
        projection = model.model.layers[1].self_attn.o_proj
        projection.register_forward_pre_hook(lambda module, inputs: (inputs[0] * FACTORS,))
    assert_same_records(measured(adapted), measured(merged), 1e-4)


def test_hooks_behind_a_projection_are_no_part_of_it():
    """A steering vector, and a factor: whether the matrix is read off or stands there."""
    expected = measured(build("llama"))
    for kind in (OfSequences, None):
        model = build("llama") if kind is None else with_projection(kind)
        projection = model.model.layers[1].self_attn.o_proj
        projection.register_forward_hook(lambda module, inputs, output: 2 * output + 1)
        run = measured(model)
        assert_same_records(run, expected, 1e-5)
        assert any("change after W_O" in note for note in run.manifest["notes"])
