"""How positions enter, found by experiment, is what each row says; padding changes nothing that is captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from architectures import ROWS, build
from test_architectures import DOCUMENTS, LENGTH, handle_of, model_of, trials_of

import pavinterp as pi
from pavinterp.capture.paths import capture_for
from pavinterp.measures.load import Load
from pavinterp.models import base_model, untouched
from pavinterp.positions import PADS, position_scheme

SCHEMES = {
    "rotary": "relative (rotary)",
    "learned": "absolute (learned or sinusoidal)",
    "sinusoidal": "absolute (learned or sinusoidal)",
    "ALiBi": "in the scores (ALiBi)",
    "none": "none",
    "not told": "not told",
}


@pytest.mark.parametrize("name", ROWS)
def test_the_scheme_is_found(name):
    assert position_scheme(handle_of(name), pi.load(model_of(name))) == SCHEMES[ROWS[name].scheme]


# pavinterp pads nothing; here a model is run as its owner might, and the capture has to see what the mask hides
# (not of sparse attention: its top-k breaks ties, scores of exactly zero, by place in the memory, so that the model
# itself goes another way when padded: 5 % to 30 % of its final hidden states).
PADDED = [name for name, row in ROWS.items() if row.path == "attention_interface" and not row.most]


def loads_of(handle, tokens, real, **given):
    """By layer the load of every test of the last sequence, read within its real positions."""
    found = {}

    def on_layer(call):
        mask = call.mask if call.mask is None else call.mask[:, :, real, real]
        cut = replace(
            call,
            queries=call.queries[:, :, real],
            keys=call.keys[:, :, real],
            values=call.values[:, :, real],
            response=call.response[:, real],
            attended=call.attended if call.attended is None else call.attended[:, real],
            mask=mask,
        )
        found[call.layer] = Load()(trials_of(cut, tokens[:, real], len(tokens) - 1))

    with untouched(handle.model), capture_for(handle, on_layer), torch.no_grad():
        base_model(handle.model)(input_ids=tokens, use_cache=False, **given)
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_sequence_has_the_same_loads(name, side):
    """A batch of two, the second one shorter, as its owner would run it: mask and positions of transformers' own."""
    handle = handle_of(name)
    long, short = torch.from_numpy(DOCUMENTS[0]), torch.from_numpy(DOCUMENTS[1])[: LENGTH - PADS]
    pads = torch.zeros(PADS, dtype=torch.long)
    padded = torch.stack([long, torch.cat([pads, short] if side == "left" else [short, pads])])
    mask = torch.ones_like(padded)
    mask[1, :PADS] = 0
    if side == "right":
        mask[1] = mask[1].flip(0)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    real = slice(PADS, None) if side == "left" else slice(0, LENGTH - PADS)
    alone = loads_of(handle, short[None], slice(None))
    together = loads_of(handle, padded, real, attention_mask=mask, position_ids=positions)
    for layer, expected in alone.items():
        for column in ("effective_load", "fidelity", "top_strength", "nominal_load"):
            torch.testing.assert_close(together[layer][column], expected[column], rtol=1e-4, atol=1e-5, msg=column)


@pytest.mark.parametrize("positions", [8, 9, 12])
def test_a_model_of_few_positions(positions):
    found = pi.verify(build("gpt2", n_positions=positions))
    assert found["passed"]
    assert found["positions"] in (SCHEMES["learned"], "not told")
    assert max(found["padding_change"].values()) <= 1e-5
