"""Made-up runs with the frames of a real one, at any size, with strings that try to break a page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

ESTIMATES = {
    "effective_load": ("associations", "How many associations a response is made of."),
    "nominal_load": ("associations", "Positions that a test can see."),
    "interference_load": ("associations", "Random associations that would show this much crosstalk."),
    "fidelity": ("cosine, -1 to 1", "Cosine between the response and the target's US."),
    "retrieval_error": ("fraction of tests", "Share of tests with fidelity^2 < 1/2."),
    "top_strength": ("fraction, 0 to 1", "Largest associative strength of a test."),
    "own_capacity_worst": ("associations", "Worst-case capacity of the head's own CSs."),
    "own_capacity_average": ("associations", "Average-case capacity of the head's own CSs."),
    "d_eff": ("dimensions", "1 / E[cos^2] between different centred CSs."),
    "coherence": ("cosine, 0 to 1", "E|cos| between different centred CSs."),
    "d_eff_query": ("dimensions", "Effective dimension in the query metric."),
    "utilisation_worst": ("ratio", "Effective load / N_worst."),
    "utilisation_average": ("ratio", "Effective load / N_avg."),
    "load_growth": ("log associations per log position", "Slope of log load on log position."),
    "load_intercept": ("log associations", "Intercept of the same fit."),
    "horizon_worst": ("positions", "Position at which the fit crosses N_worst."),
    "horizon_average": ("positions", "Position at which the fit crosses N_avg."),
    "sink_strength": ("fraction, 0 to 1", "Mean strength on position 0 and learned sinks."),
    "previous_token_score": ("fraction, 0 to 1", "Strength on the position before."),
    "induction_score": ("fraction, 0 to 1", "Strength on the position after the last occurrence."),
    "duplicate_token_score": ("fraction, 0 to 1", "Strength on the last occurrence."),
}
PLAIN = {
    "kv_head": ("index", "KV head that the query head reads."),
    "d_k": ("dimensions", "Length of a CS."),
    "d_v": ("dimensions", "Length of a US."),
    "window": ("positions", "Positions a test sees at most."),
    "capacity_worst": ("associations", "N_worst for isotropic CSs."),
    "capacity_average": ("associations", "N_avg for isotropic CSs."),
    "regime": ("name", "Where the interval of the load lies."),
    "sequences": ("count", "Sequences measured."),
    "clusters": ("count", "Clusters of the bootstrap."),
}

HOSTILE = [
    "<script>document.title='pwned'</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "&lt;b&gt; &amp;",
    "\x00\x07\x1b[31m",
    "\u202edesrever\u202c",
    "\u200b\u2066zero\ufeff",
    "\ud800lone",
    "]]>{{ 7*7 }}{% raw %}",
    "\n\n\t \r\n",
    "\u0301\u0301combining",
    "\u05e9\u05dc\u05d5\u05dd",
    "x" * 400,
    "",
]
PROSE = (
    "And yet , to say the truth , reason and love keep little company together now - a - days ;\n the more the pity "
    "that some honest neighbours will not make them friends .\n Nay , I can g lee k upon occasion ."
)


@dataclass
class SyntheticRun:
    """Has what `report.write` asks of a run."""

    table: pd.DataFrame
    details: SimpleNamespace
    manifest: dict[str, Any]
    records: pd.DataFrame | None = None
    experiments: dict[str, Any] = field(default_factory=dict)

    def heads(self) -> pd.DataFrame:
        return self.table


def run(
    layers: int = 4,
    heads: int = 8,
    *,
    group: int = 1,
    d_k: int = 32,
    context: int = 512,
    sequences: int = 8,
    tests: int = 24,
    examples: int = 2,
    clusters: int = 16,
    hostile: bool = True,
    seed: int = 0,
) -> SyntheticRun:
    """A run of `layers x heads` heads with plausible numbers; one head is undefined, some horizons are infinite."""
    rng = np.random.default_rng(seed)
    table = _heads(rng, layers, heads, group, d_k, context, sequences, clusters)
    strings = [f" {word}" for word in PROSE.split(" ")] + (HOSTILE if hostile else [])
    details = SimpleNamespace(
        tests=_tests(rng, table, context, sequences, tests),
        spectra=_spectra(rng, table, d_k),
        examples=_examples(rng, table, strings, context, examples),
    )
    return SyntheticRun(table, details, _manifest(table, context, sequences, clusters, hostile))


def _heads(
    rng: np.random.Generator, layers: int, heads: int, group: int, d_k: int, context: int, sequences: int, clusters: int
) -> pd.DataFrame:
    index = pd.MultiIndex.from_product([range(layers), range(heads)], names=["layer", "head"])
    n = len(index)
    worst = 1 + 0.5 * math.sqrt(math.pi * d_k / 2)
    average = 1.0 + d_k
    load = np.exp(rng.normal(math.log(worst) + 0.2, 0.9, n)).clip(1.0, context / 2)
    if n > 5:
        load[5] = average * 1.8
    growth = rng.normal(0.3, 0.2, n)
    intercept = np.log(load) - growth * math.log(context / 2)
    kv = np.array([h // group for _, h in index])
    d_eff_by_kv = rng.uniform(0.2, 0.8, (layers, heads)) * d_k
    d_eff = np.array([d_eff_by_kv[layer, k] for (layer, _), k in zip(index, kv, strict=True)])
    with np.errstate(over="ignore", divide="ignore"):
        horizons = [np.exp((math.log(bound) - intercept) / growth) for bound in (worst, average)]
    fidelity = 1 / np.sqrt(1 + (load - 1) / d_k)
    estimates: dict[str, np.ndarray] = {
        "effective_load": load,
        "nominal_load": np.full(n, context / 2),
        "interference_load": np.exp(rng.normal(3.0, 1.0, n)),
        "fidelity": fidelity,
        "retrieval_error": rng.beta(2, 5, n),
        "top_strength": (1.4 / load).clip(0, 1),
        "own_capacity_worst": 1 + 0.5 * np.sqrt(math.pi * d_eff / 2),
        "own_capacity_average": 1 + d_eff,
        "d_eff": d_eff,
        "coherence": np.sqrt(2 / (math.pi * d_eff)),
        "d_eff_query": d_eff * 0.6,
        "utilisation_worst": load / worst,
        "utilisation_average": load / average,
        "load_growth": growth,
        "load_intercept": intercept,
        "horizon_worst": np.where(growth > 0, horizons[0], math.inf),
        "horizon_average": np.where(growth > 0, horizons[1], math.inf),
        "sink_strength": rng.beta(1, 3, n),
        "previous_token_score": rng.beta(0.4, 5, n),
        "induction_score": rng.beta(0.4, 5, n),
        "duplicate_token_score": rng.beta(0.4, 8, n),
    }
    frame = pd.DataFrame(index=index)
    frame["kv_head"], frame["d_k"], frame["d_v"] = kv, d_k, d_k
    frame["window"] = pd.array([pd.NA if layer % 3 == 0 else 128 for layer, _ in index], dtype="Int64")
    frame["capacity_worst"], frame["capacity_average"] = worst, average
    for name, values in estimates.items():
        spread = np.exp(rng.uniform(0.03, 0.2, n))
        with np.errstate(invalid="ignore"):
            low, high = (values / spread, values * spread) if (values > 0).all() else (values - 0.1, values + 0.1)
        frame[name] = values
        frame[f"{name}_lo"] = low if clusters >= 8 else np.nan
        frame[f"{name}_hi"] = high if clusters >= 8 else np.nan
    columns = [f"{name}{end}" for name in estimates for end in ("", "_lo", "_hi")]
    if n > 1:
        frame.loc[frame.index[n // 2], columns] = np.nan  # a head whose responses are all zero
    frame["regime"] = [
        _regime(a, b, worst, average)
        for a, b in zip(frame["effective_load_lo"], frame["effective_load_hi"], strict=True)
    ]
    frame["sequences"], frame["clusters"] = sequences, clusters
    described = ESTIMATES | PLAIN
    frame.attrs["units"] = {name: unit for name, (unit, _) in described.items()}
    frame.attrs["descriptions"] = {name: text for name, (_, text) in described.items()}
    frame.attrs["intervals"] = _interval_text(clusters)
    return frame


def _interval_text(clusters: int) -> str:
    if clusters < 8:
        return f"No intervals: {clusters} documents, and fewer than 8 clusters do not bear a bootstrap."
    return f"95 % percentile bootstrap over {clusters} documents, 1,000 draws, seed 0."


def _regime(low: float, high: float, worst: float, average: float) -> str:
    if math.isnan(low):
        return "undefined"
    first = "error-free" if low <= worst else "graded" if low <= average else "beyond"
    last = "error-free" if high <= worst else "graded" if high <= average else "beyond"
    return first if first == last else f"{first}/{last}"


def _tests(rng: np.random.Generator, table: pd.DataFrame, context: int, sequences: int, tests: int) -> pd.DataFrame:
    position = np.unique(np.geomspace(1, context, tests).astype(int)) - 1
    weight = np.gradient(np.append(position, context).astype(float))[:-1].clip(1)
    blocks = []
    for (layer, head), row in table.iterrows():
        count = len(position) * sequences
        where = np.tile(position, sequences)
        growth = 0.3 if math.isnan(row["load_growth"]) else row["load_growth"]
        start = 0.5 if math.isnan(row["load_intercept"]) else row["load_intercept"]
        load = np.exp(start + growth * np.log(where + 1.0) + rng.normal(0, 0.35, count)).clip(1, where + 1.0)
        square = (1 / (1 + (load - 1) / row["d_k"]) + rng.normal(0, 0.08, count)).clip(0, 1)
        blocks.append(
            pd.DataFrame(
                {
                    "sequence": np.repeat(np.arange(sequences), len(position)).astype("int32"),
                    "layer": np.int32(layer),  # type: ignore[call-overload]
                    "head": np.int32(head),
                    "position": where.astype("int32"),
                    "weight": np.tile(weight, sequences).astype("float32"),
                    "effective_load": load.astype("float32"),
                    "nominal_load": (where + 1).astype("float32"),
                    "interference_load": (load * 2).astype("float32"),
                    "fidelity": np.sqrt(square).astype("float32"),
                    "top_strength": (1 / load).astype("float32"),
                    "response_norm": rng.gamma(3, 1, count).astype("float32"),
                }
            )
        )
    return pd.concat(blocks, ignore_index=True)


def _spectra(rng: np.random.Generator, table: pd.DataFrame, d_k: int) -> pd.DataFrame:
    blocks = []
    for layer, kv_head in sorted({(int(layer), int(kv)) for (layer, _), kv in table["kv_head"].items()}):
        values = np.exp(-np.arange(d_k) / rng.uniform(3, d_k / 2))
        blocks.append(
            pd.DataFrame(
                {"layer": layer, "kv_head": kv_head, "rank": np.arange(1, d_k + 1), "eigenvalue": values / values.sum()}
            )
        )
    return pd.concat(blocks, ignore_index=True)


def _examples(
    rng: np.random.Generator, table: pd.DataFrame, strings: list[str], context: int, count: int
) -> list[dict[str, Any]]:
    found = []
    reasons = ["largest response", "typical load", "highest load", "purest retrieval"]
    for (layer, head), row in table.iterrows():
        for number in range(count):
            length = 64
            position = int(rng.integers(length, context))
            tokens = [strings[i] for i in rng.integers(0, len(strings), length)]
            strengths = rng.dirichlet(np.full(length, 0.1))
            start = position - length + 1
            shares = strengths / strengths.sum()
            best = np.argsort(-shares)[:6]
            associations = [
                {
                    "position": int(start + j),
                    "token": tokens[j],
                    "before": "".join(tokens[max(0, j - 4) : j]),
                    "after": "".join(tokens[j + 1 : j + 4]),
                    "strength": float(strengths[j]),
                    "share": float(shares[j]),
                    "promotes": [strings[i] for i in rng.integers(0, len(strings), 5)],
                    "suppresses": [strings[i] for i in rng.integers(0, len(strings), 5)],
                }
                for j in best
            ]
            found.append(
                {
                    "layer": int(layer),  # type: ignore[call-overload]
                    "head": int(head),
                    "sequence": number,
                    "document": "a midsummer night's dream <i>",
                    "position": position,
                    "effective_load": float(row["effective_load"]),
                    "fidelity": float(row["fidelity"]),
                    "response_norm": 3.2,
                    "why": reasons[number % 4],
                    "window_start": start,
                    "tokens": tokens,
                    "strengths": [float(s) for s in strengths],
                    "associations": associations,
                }
            )
    return found


def _manifest(table: pd.DataFrame, context: int, sequences: int, clusters: int, hostile: bool) -> dict[str, Any]:
    layers = table.index.get_level_values("layer").nunique()
    name = "tiny</title><script>alert(1)</script>" if hostile else "tiny"
    return {
        "pavinterp_version": "0.1.0",
        "created": "2025-01-01T12:00:00Z",
        "command": f"pavinterp report {name} --corpus notes.txt --context {context} --seed 0",
        "model": {
            "name": name,
            "source": "folder",
            "revision": "sha256:" + "0123456789abcdef" * 4,
            "architecture": "GPT2LMHeadModel",
            "parameters": 3_800_000,
            "dtype": "float32",
            "device": "cpu",
            "layers": layers,
            "heads": len(table),
            "path": "attention_interface",
        },
        "corpus": {
            "source": "notes.txt",
            "token_hash": "sha256:" + "fedcba9876543210" * 4,
            "documents": clusters,
            "sequences": sequences,
            "context": context,
            "tokens": sequences * context,
            "bos": "auto",
            "bos_added": True,
            "dropped_tokens": 77,
        },
        "arguments": {"model": name, "corpus": "notes.txt", "context": context, "layers": None, "seed": 0},
        "seed": 0,
        "tests_per_sequence": 64,
        "certificate": {
            "tolerance": 1e-5,
            "largest": 3.1e-7,
            "by_layer": {str(layer): 1e-7 * (1 + layer % 4) for layer in range(layers)},
            "rows_checked": 64 * layers,
        },
        "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.24.0", "numpy": "2.3", "pandas": "3.1"},
        "wall_seconds": 71.4,
        "intervals": _interval_text(clusters),
        "notes": ["The model was loaded without its last document."],
    }
