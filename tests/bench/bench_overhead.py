"""What measuring costs: time and peak memory over the model's bare forward pass, as ratios, from one command.

    python tests/bench/bench_overhead.py                      # SmolLM2-135M, context 1,024, batch 2, 2 threads
    python tests/bench/bench_overhead.py --model demo --context 512 --rounds 3

Each round runs the two side by side in processes of their own, alternating; both load the same weights and read the
same text. "bare" is the base model alone (no LM head, no KV cache, no gradients); "measure" is the same passes with
every default measure and the certificate. Reading the text and aggregating are in neither. Medians and ranges over
rounds; the ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def child(arguments: argparse.Namespace) -> None:
    """One process: load, one pass to warm up, then the timed passes."""
    import torch

    torch.set_num_threads(arguments.threads)
    import pavinterp as pi
    from pavinterp.measures import all_measures
    from pavinterp.sweep import forward, sweep

    handle = pi.load(arguments.model)
    stimuli = pi.tokenise(
        pi.corpus(arguments.corpus), handle.tokenizer, context=arguments.context, sequences=arguments.sequences
    )
    tokens = torch.stack([torch.from_numpy(t) for t in stimuli.tokens])
    forward(handle, tokens[:1, : min(64, arguments.context)])
    idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    if arguments.child == "bare":
        for i in range(0, len(tokens), arguments.batch):
            forward(handle, tokens[i : i + arguments.batch])
    else:
        text = [m for m in all_measures() if m.stimuli == "text"]
        for _ in sweep(handle, stimuli, text, tests=arguments.tests, layers=None, batch=arguments.batch, seed=0):
            pass
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak_mb": peak / 1024, "idle_mb": idle / 1024}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="anything pavinterp loads; default SmolLM2-135M")
    parser.add_argument("--corpus", default="demo")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", choices=["bare", "measure"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None:
        sys.path.insert(0, str(ROOT / "tests"))
        from real_models import fetch

        arguments.model = str(fetch("smollm2"))
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.child:
        child(arguments)
        return
    results: dict[str, list[dict[str, float]]] = {"bare": [], "measure": []}
    for round_number in range(arguments.rounds):
        order = ["bare", "measure"] if round_number % 2 == 0 else ["measure", "bare"]
        for what in order:
            flags = [f"--{k}={v}" for k, v in vars(arguments).items() if k not in ("child", "rounds")]
            command = [sys.executable, __file__, f"--child={what}", *flags]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[what].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {round_number + 1} {what}: {results[what][-1]}", file=sys.stderr, flush=True)
    print(f"{arguments.model}, context {arguments.context}, {arguments.sequences} sequences, batch {arguments.batch}, "
          f"{arguments.tests} tests, {arguments.threads} threads, {arguments.rounds} rounds")  # fmt: skip
    print("| | bare forward pass | measure | ratio (median of rounds, range) |\n|---|---|---|---|")
    for key, unit in (("seconds", "s"), ("peak_mb", "MB")):
        bare, measured = ([r[key] for r in results[what]] for what in ("bare", "measure"))
        ratios = [m / b for m, b in zip(measured, bare, strict=True)]
        cells = [f"{statistics.median(x):.2f} {unit} ({min(x):.2f} to {max(x):.2f})" for x in (bare, measured)]
        print(f"| {key.split('_')[0]} | {cells[0]} | {cells[1]} | "
              f"**{statistics.median(ratios):.3f}** ({min(ratios):.3f} to {max(ratios):.3f}) |")  # fmt: skip


if __name__ == "__main__":
    main()
