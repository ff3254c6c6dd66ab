"""What measuring costs: time and peak memory over the model's bare forward pass, as ratios, from one command.

    python tests/bench/bench_overhead.py                      # SmolLM2-135M, context 1,024, batch 2, 2 threads
    python tests/bench/bench_overhead.py --model demo --context 512 --rounds 3
    python tests/bench/bench_overhead.py --grid               # SmolLM2 and Gemma-3, context 1,024 and 4,096, batch 1, 8
    python tests/bench/bench_overhead.py --wide               # two random layers as wide as Llama 1B's and 8B's
    python tests/bench/bench_overhead.py --model smollm2-135m-shape --context 32768 --batch 1 --sequences 1 --rounds 1

Each round runs the two side by side in processes of their own, alternating; both load the same weights and read the
same tokens. "bare" is the base model alone (no LM head, no KV cache, no gradients); "measure" is the same passes with
every default measure of text and the certificate. Reading the text and aggregating are in neither. Medians and ranges
over rounds; the ratio is the median of the rounds' own ratios.

Peak memory is the whole process's peak resident set (getrusage): interpreter, libraries, weights and what loading them
took are in both. Where loading takes more than the passes ("idle" on standard error is the peak before them) the
ratio is near 1 and says little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import side


def work(settings: dict[str, Any]) -> dict[str, Any]:
    """One process: load, one pass to warm up, then the timed passes."""
    import torch

    torch.set_num_threads(settings["threads"])
    from pavinterp.measures import all_measures
    from pavinterp.sweep import forward, sweep

    handle, batch = side.load(settings["model"]), settings["batch"]
    sequences = side.tokens(handle, settings["corpus"], settings["context"], settings["sequences"])
    tokens = torch.stack([torch.from_numpy(t) for t in sequences])
    text = [m for m in all_measures() if m.stimuli == "text"]
    forward(handle, tokens[:1, :64])
    idle = side.peak_mb()
    started = time.perf_counter()
    if settings["way"] == "bare":
        for i in range(0, len(tokens), batch):
            forward(handle, tokens[i : i + batch])
    else:
        stimuli = side.stimuli(sequences)
        for _ in sweep(handle, stimuli, text, tests=settings["tests"], layers=None, batch=batch, seed=0):
            pass
    return {"seconds": time.perf_counter() - started, "peak_mb": side.peak_mb(), "idle_mb": idle}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3 or anything pavinterp loads")
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4, help="at least one batch is read")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--grid", action="store_true", help="real models x contexts x batches")
    parser.add_argument("--wide", action="store_true", help="random layers of the width of a billion parameters")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def settings_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One dictionary for each row of the table."""
    usual = {name: getattr(arguments, name) for name in ("corpus", "tests", "threads", "sequences")}
    grid = []
    if arguments.grid:
        grid += itertools.product(side.REAL, (1024, 4096), (1, 8))
    if arguments.wide:
        grid += itertools.product(side.WIDE, (1024,), (2,))
    grid = grid or [(arguments.model, arguments.context, arguments.batch)]
    return [
        {**usual, "model": model, "context": context, "batch": batch, "sequences": max(batch, arguments.sequences)}
        for model, context, batch in grid
    ]


def main() -> None:
    arguments = parse()
    if arguments.child:
        side.answer(work, json.loads(arguments.child))
    every = settings_of(arguments)
    for model in {settings["model"] for settings in every}:
        side.found(model)  # fetched before anything is timed
    print(f"{arguments.tests} tests a sequence, {arguments.threads} threads, {arguments.rounds} rounds: "
          "medians (and ranges); ratios are medians of the rounds' own\n")  # fmt: skip
    print(side.header("model", "context", "batch", "sequences", "bare pass, s", "measured, s", "time ratio",
                      "bare peak, MB", "measured peak, MB", "memory ratio"))  # fmt: skip
    for settings in every:
        results = side.alternate(
            ("bare", "measure"),
            arguments.rounds,
            lambda way, settings=settings: side.child(__file__, {**settings, "way": way}),
        )
        bare, measured = results.values()
        what = [settings[name] for name in ("model", "context", "batch", "sequences")]
        if failed := side.failure(bare) or side.failure(measured):
            print(side.row(*what, failed, *["–"] * 5), flush=True)
            continue
        cells = []
        for key, digits in (("seconds", 2), ("peak_mb", 0)):
            cells += [side.spread([r[key] for r in rows], digits) for rows in (bare, measured)]
            cells.append(f"**{side.ratio(measured, bare, key)}**")
        print(side.row(*what, *cells), flush=True)


if __name__ == "__main__":
    main()
