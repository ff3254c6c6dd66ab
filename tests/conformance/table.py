"""docs/models.md from the rows of the suite: python -m tests.conformance.table writes it, a test keeps it true."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from architectures import REFUSED, ROWS, Row

FILE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEAD = """# Architectures that are tested

One tiny model with random weights of each is built from transformers' configuration and measured: the certificate
(1e-5 in float32), the response against the model's own output projection, the visible positions, how positions enter,
batches, left and right padding (registry), the future, that the model is as it was, that what was rebuilt changes no
logit when it is put back; in float16, bfloat16 and float64 too where the model itself runs in them
(`tests/conformance/`). Other decoders are captured the same way and certified in every run; `pavinterp verify MODEL`
says whether yours can be measured. This table is generated from the suite's rows
(`python -m tests.conformance.table`).

*registry*: transformers' attention registry; *hooks*: hooks on the family's own modules; *bridge*: hooks on a
TransformerBridge of TransformerLens. Where two are named the first is the default, and both agree in every record to
1e-4. *features* are those of the tested configuration; *gates* multiply each response before the output projection;
*sparse* attention sees positions that the model chooses by content (its own choice changes when a sequence is padded:
pavinterp pads nothing).

| `model_type` | captured by | attention layers | positions | features |
|---|---|---|---|---|
"""
NOT = """
## Known not to be measured

Refused in one line:

| `model_type` | why |
|---|---|
"""


def line(name: str, row: Row) -> str:
    """One row of the table."""
    first = {"attention_interface": ["registry"], "module_hooks": ["hooks"], "transformer_lens": []}[row.path]
    paths = first + (["bridge"] if row.bridge else [])
    features = []
    if row.kv_heads < 4:
        features.append("one KV head" if row.kv_heads == 1 else "grouped queries")
    if row.d_k != row.d_v:
        features.append("d_k ≠ d_v")
    if any(row.windows):
        features.append("chunks" if row.chunked else "windows")
    if row.most:
        features.append("sparse")
    if row.softcap is not None:
        features.append("soft-cap")
    if row.sinks:
        features.append("learned sinks")
    if row.gated:
        features.append("gates")
    depth = next(
        row.options[key] for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in row.options
    )
    layers = "all" if len(row.layers) == depth else f"{len(row.layers)} of {depth}"
    return f"| {name} | {', '.join(paths)} | {layers} | {row.scheme} | {', '.join(features) or '–'} |\n"


def table() -> str:
    """The whole file."""
    refused = "".join(f"| {name} | {row.why} |\n" for name, row in REFUSED.items())
    return HEAD + "".join(line(name, row) for name, row in ROWS.items()) + NOT + refused


if __name__ == "__main__":
    FILE.write_text(table(), encoding="utf-8")
