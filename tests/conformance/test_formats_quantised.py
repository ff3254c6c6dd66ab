"""Quantised models: certified as they compute, and W_O as the layer applies it.

torch's own int8 always runs; bitsandbytes, torchao and optimum-quanto where they are installed (they are large or print
on import, so the `test` extra leaves them out). Not run on a CPU here: GPTQ and AWQ, whose packages (gptqmodel,
autoawq) compile or need GPU kernels, and HQQ, which is sources only; GGUF is dequantised on loading
(tests/test_gguf_cache.py).
"""

from __future__ import annotations

import warnings

import pytest
import torch
from formats import TOKENS, assert_same_records, build, logits, measured

import pavinterp as pi
from pavinterp.capture.output_projection import output_weight
from pavinterp.capture.paths import capture_for, forward
from pavinterp.models import untouched

# Large enough for the blocks of 64 that the packages quantise in.
WIDE = {
    "llama": {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    "opt": {"hidden_size": 128, "ffn_dim": 128, "word_embed_proj_dim": 128},
}
# How far the layer is from its matrix: nothing but summation where weights alone are quantised; one part in 127 of the
# largest activation where those are too, about three times that relative to their norm.
WEIGHTS, ACTIVATIONS = 1e-5, 3e-2


def torch_int8(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def by_bitsandbytes(model, folder, **options):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model.save_pretrained(folder)
    how = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32, device_map="cpu")


def bitsandbytes_int8(model, folder):
    return by_bitsandbytes(model, folder, load_in_8bit=True)


def bitsandbytes_nf4(model, folder):
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return by_bitsandbytes(model, folder, load_in_4bit=True, **options)


def torchao_int8(model, folder):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def torchao_int8_activations(model, folder):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    return model


def quanto_int8(model, folder):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


HOW = {
    torch_int8: ACTIVATIONS,
    bitsandbytes_int8: ACTIVATIONS,
    bitsandbytes_nf4: WEIGHTS,
    torchao_int8: WEIGHTS,
    torchao_int8_activations: ACTIVATIONS,
    quanto_int8: WEIGHTS,
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", WIDE)
def test_quantised(name, how, tmp_path):
    model = how(build(name, **WIDE[name]), tmp_path)
    before = logits(model)
    run = measured(model)  # certified: measure() ends where the certificate does not hold
    assert torch.equal(before, logits(model))
    with pytest.raises(AssertionError):  # it was quantised
        assert_same_records(run, measured(build(name, **WIDE[name])), 1e-3)
    handle, off = pi.load(model), []

    def compare(call):
        matrix = output_weight(call.projection, call.queries.shape[1], call.values.shape[-1]).flatten(0, 1)
        response = call.response[0]
        applied = call.projection(response) - call.projection(torch.zeros_like(response))
        off.append(float((response @ matrix - applied).norm() / applied.norm()))

    with untouched(model), capture_for(handle, compare):
        forward(handle, TOKENS)
    assert len(off) == 2
    assert max(off) <= HOW[how]
