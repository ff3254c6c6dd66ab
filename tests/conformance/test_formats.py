"""Every row of tests/architectures.py in other precisions, shapes and attention kernels: certified, and the same.

Not run on a CPU: float64 of the rows in NO_FLOAT64, whose grouped matrix product (mixtures of experts) or mask torch or
transformers do not have in float64; flash attention, whose kernels need a GPU.
"""

from __future__ import annotations

import pytest
import torch
from architectures import ROWS, VOCABULARY, build
from test_architectures import COLUMNS, DOCUMENTS, MEASURES, assert_same, records_of
from test_run import stimuli

import pavinterp as pi
from pavinterp.capture import certificate
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.models import untouched
from pavinterp.sweep import inspect, sweep

NO_FLOAT64 = (
    "afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe", "glm_moe_dsa",
    "gpt_oss", "granitemoe", "jamba", "laguna", "minimax", "minimax_m3", "mixtral", "olmoe", "phimoe", "qwen2_moe",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next", "xglm",
)  # fmt: skip
SINGLE_SOFTMAX = ("bloom", "gemma2", "gpt_neo", "mpt", "vaultgemma")  # transformers takes it in float32, whatever comes
EXACT = 1e-12  # float64 sums in another order: 1e-15 each, thousands of them
# Half the machine epsilon is what rounding the output alone gives (5e-4 and 4e-3): most kernels sum in float32.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
CASES = [(name, dtype) for dtype in DTYPES for name in ROWS if dtype != "float64" or name not in NO_FLOAT64]


def swept(model, documents=DOCUMENTS[:2], tests=None):
    """Largest residual, and the records."""
    handle = on_path(pi.load(model))
    with untouched(handle.model):
        (part,) = sweep(handle, stimuli(documents), MEASURES, tests=tests, layers=None, batch=8, seed=0)
    return max(max(row) for row in part.residuals.values()), part.records


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_certified_within_the_tolerance_of_the_precision(name, dtype):
    largest, records = swept(build(name).to(DTYPES[dtype]))
    exact = dtype == "float64" and name not in SINGLE_SOFTMAX
    assert largest <= (EXACT if exact else certificate.tolerance(DTYPES[dtype]))
    assert {str(records[column].dtype) for column in COLUMNS} == {"float32"}


@pytest.mark.parametrize("name", NO_FLOAT64)
def test_a_precision_that_the_model_itself_cannot_run_in(name):
    with pytest.raises(UserError, match=r"itself does not run here in float64.*try another dtype") as error:
        swept(build(name).double())
    assert "\n" not in str(error.value)


SHAPES = {
    "more heads than a group": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "a KV head each": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "one KV head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "heads wider than the model": {"head_dim": 48},
    "narrow heads": {"head_dim": 4},
}
CONTEXTS = (8, 9, 33, 64)  # the window of 8, one more, four windows and one, all positions that there are


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "llama4", "olmo3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes(name, shape):
    model = build(name, **SHAPES[shape])
    wanted = ROWS[name].options | SHAPES[shape]
    handle = on_path(pi.load(model))
    with untouched(model):
        layers = inspect(handle)
    expected = (wanted["num_attention_heads"], wanted["num_key_value_heads"], wanted["head_dim"])
    assert {(info.heads, info.kv_heads, info.d_k) for info in layers} == {expected}
    for length in CONTEXTS:
        for sequences in (1, 3):
            tokens = [(document * 3 + i) % (VOCABULARY - 3) + 3 for i, document in enumerate(DOCUMENTS[:sequences])]
            largest, _ = swept(model, [t.repeat(4)[:length] for t in tokens])
            assert largest <= certificate.tolerance(torch.float32)


KERNELS = ("eager", "sdpa")


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.path != "transformer_lens"])
def test_every_kernel_gives_the_same_records(name):
    """To 1e-5, as float32 sums differ by 1e-7 a term; single tests are the business of the certificate."""
    found = {}
    for kernel in KERNELS:
        model = build(name)
        try:
            model.set_attn_implementation(kernel)
        except ValueError:  # the model's class does not have that kernel
            continue
        found[kernel], _ = records_of(on_path(pi.load(model)), DOCUMENTS[:3], 3)
    assert found
    for records in found.values():
        assert_same(records, found["eager"], 1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama", "llama4", "mistral", "qwen3"])
def test_flex_attention_gives_the_same_records(name):
    """Uncompiled, as compiling takes minutes on a CPU; windows, chunks and soft-caps reach it as functions."""
    model = build(name)
    model.set_attn_implementation("flex_attention")
    torch.compiler.set_stance("force_eager")
    try:
        records, _ = records_of(on_path(pi.load(model)), DOCUMENTS[:3], 3)
    finally:
        torch.compiler.set_stance("default")
    assert_same(records, records_of(on_path(pi.load(build(name))), DOCUMENTS[:3], 3)[0], 1e-5)
