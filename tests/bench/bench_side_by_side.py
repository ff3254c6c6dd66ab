"""pavinterp beside what a user would do otherwise for the same numbers: time, peak memory, ratio to the bare pass.

    python tests/bench/bench_side_by_side.py                     # SmolLM2-135M, context 1,024, batch 2, 4 sequences
    python tests/bench/bench_side_by_side.py --limit-gb 4        # each process with 4 GB of address space
    python tests/bench/bench_side_by_side.py --model demo --context 128 --rounds 1

Each way runs in a process of its own, in alternating order, on the same weights and tokens:

- bare: the base model's forward pass (no LM head, no KV cache, no gradients). Produces hidden states.
- pavinterp: `sweep` with every default measure of text at 64 tests a sequence. Produces all columns of a record (load,
  fidelity, interference, coherence, sinks, ...) and the certificate. Time includes both and the records.
- eager: transformers' eager attention with `output_attentions=True`, values by hooks; then the effective load of every
  position, and nothing else. All layers' attention probabilities are held until the pass ends, as transformers does.
- transformer_lens: `run_with_cache` of a TransformerBridge, filtered to q, k, v and pattern of every layer; the same
  effective load. The bridge computes the LM head, of the last position alone.
- nnsight: one trace that saves the q, k, v which enter each layer's attention function (sdpa); attention probabilities
  rebuilt layer by layer; the same effective load. Not a dependency: `pip install nnsight` for its row.

The last column is the effective load itself, mean over heads and sequences of the median over positions: it shows that
all compute the same; pavinterp estimates the median from its tests, the others take every position. None of the others
checks what it captured. Every way reads 64 tokens before the clock starts. Peak memory is the whole process's peak
resident set (getrusage): libraries and weights are in it. A way that fails says how in its row; `--limit-gb` limits
address space, of which a process takes more than resident memory (libraries, thread stacks).
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import side

WAYS = ("bare", "pavinterp", "eager", "transformer_lens", "nnsight")


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """One process: load, set the way up, read 64 tokens, then the timed passes."""
    import torch

    torch.set_num_threads(settings["threads"])
    handle, batch = side.load(settings["model"]), settings["batch"]
    sequences = side.tokens(handle, settings["corpus"], settings["context"], settings["sequences"])
    if settings["way"] == "pavinterp":
        with_pavinterp(handle, [sequences[0][:64]], 1, settings["tests"])
        started = time.perf_counter()
        found = with_pavinterp(handle, sequences, batch, settings["tests"])
    else:
        import competitors

        from pavinterp.sweep import forward

        made = {"eager": competitors.eager, "transformer_lens": competitors.lens, "nnsight": competitors.nnsight}
        bare = settings["way"] == "bare"
        read = (lambda tokens: forward(handle, tokens)) if bare else made[settings["way"]](handle)
        tokens = torch.stack([torch.from_numpy(t) for t in sequences])
        with torch.no_grad():
            read(tokens[:1, :64])
            started, medians = time.perf_counter(), []
            for i in range(0, len(tokens), batch):
                out = read(tokens[i : i + batch])
                medians += [] if bare else [out.median(-1).values]
        found = None if bare else float(torch.cat(medians, dim=1).mean())
    return {"seconds": time.perf_counter() - started, "peak_mb": side.peak_mb(), "load": found}


def with_pavinterp(handle: Any, sequences: list[Any], batch: int, tests: int) -> float:
    import pandas as pd

    from pavinterp.measures import all_measures
    from pavinterp.sweep import sweep

    measures, stimuli = [m for m in all_measures() if m.stimuli == "text"], side.stimuli(sequences)
    parts = sweep(handle, stimuli, measures, tests=tests, layers=None, batch=batch, seed=0)
    return float(pd.concat([part.records for part in parts])["effective_load"].mean())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, gemma3, demo or another of Llama's or GPT-2's kind"
    )
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tests", type=int, default=64, help="tests a sequence, pavinterp's alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-gb", type=float, help="address space of each process")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of them; bare is always run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.child:
        side.answer(work, json.loads(arguments.child))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("child", "rounds", "ways")}
    side.found(arguments.model)  # fetched before anything is timed
    ways = ["bare", *(way for way in arguments.ways.split(",") if way not in ("", "bare"))]
    results = side.alternate(ways, arguments.rounds, lambda way: side.child(__file__, {**settings, "way": way}))
    limit = f", {arguments.limit_gb:g} GB of address space" if arguments.limit_gb else ""
    print(f"{arguments.model}, context {arguments.context}, {arguments.sequences} sequences, batch {arguments.batch}, "
          f"{arguments.tests} tests, {arguments.threads} threads{limit}, {arguments.rounds} rounds: "
          "medians (and ranges); ratios are medians of the rounds' own\n")  # fmt: skip
    print(side.header("way", "time, s", "over bare", "peak memory, MB", "over bare", "effective load"))
    for way, rows in results.items():
        if failed := side.failure(rows):
            print(side.row(way, failed, *["–"] * 4))
            continue
        cells = []
        for key, digits in (("seconds", 2), ("peak_mb", 0)):
            bare = results["bare"]
            over = "–" if side.failure(bare) or way == "bare" else f"**{side.ratio(rows, bare, key)}**"
            cells += [side.spread([r[key] for r in rows], digits), over]
        print(side.row(way, *cells, "–" if rows[0]["load"] is None else f"{rows[0]['load']:.2f}"))


if __name__ == "__main__":
    main()
