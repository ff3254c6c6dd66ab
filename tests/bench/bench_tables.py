"""How long the table of heads with its intervals takes, from records that are in memory; no model, no text.

OMP_NUM_THREADS=2 python tests/bench/bench_tables.py      # 32 layers x 32 heads, 10,000 documents
python tests/bench/bench_tables.py --documents 100        # as many sequences, a hundred a document
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import pandas as pd

from pavinterp.measures import all_measures
from pavinterp.sweep import LayerInfo
from pavinterp.tables import heads_table


def records(sequences: int, documents: int, layers: int, heads: int) -> pd.DataFrame:
    """Log-normal numbers for every column of text, a hundredth of one of them missing."""
    rng = np.random.default_rng(0)
    rows = sequences * layers * heads
    frame = {
        "stimuli": pd.Categorical(["text"]).repeat(rows),
        "sequence": np.repeat(np.arange(sequences, dtype=np.int32), layers * heads),
        "document": np.repeat(np.arange(sequences, dtype=np.int32) * documents // sequences, layers * heads),
        "layer": np.tile(np.repeat(np.arange(layers, dtype=np.int16), heads), sequences),
        "head": np.tile(np.arange(heads, dtype=np.int16), sequences * layers),
    }
    names = [column.name for measure in all_measures() if measure.stimuli == "text" for column in measure.columns]
    frame |= {name: np.exp(rng.standard_normal(rows, dtype=np.float32)) for name in names}
    frame["effective_load"][rng.integers(0, rows, rows // 100)] = np.nan
    return pd.DataFrame(frame, copy=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found = records(arguments.sequences, arguments.documents, arguments.layers, arguments.heads)
    shapes = [LayerInfo(layer, arguments.heads, arguments.heads, 128, 128, None) for layer in range(arguments.layers)]
    held = found.memory_usage(deep=True).sum() / 2**20
    seconds = []
    for _ in range(arguments.rounds):
        started = time.perf_counter()
        table = heads_table(found, shapes)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"{len(table):,} heads, {arguments.sequences:,} sequences of {arguments.documents:,} documents, "
        f"{len(found):,} records of {held:,.0f} MB: {min(seconds):.1f} to {max(seconds):.1f} s, peak {peak:,.0f} MB"
    )


if __name__ == "__main__":
    main()
