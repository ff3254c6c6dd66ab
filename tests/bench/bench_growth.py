"""How what measuring costs grows with context, sequences, layers, heads and tests: exponents of time, and peak memory.

    python tests/bench/bench_growth.py                                # under ten minutes on 2 idle cores
    python tests/bench/bench_growth.py --axes context,tests
    python tests/bench/bench_growth.py --axes sequences --quick       # two tiny points, nothing judged

Llamas of random weights, one axis at a time, all else fixed. Every point runs in two processes of its own: one takes a
bare pass (no LM head, no KV cache, no gradients), for its peak memory; the other a `sweep` with every default measure
of text, for its peak memory, and then bare passes and sweeps in turn, for their times: the least of each. Times are
wall-clock seconds. Peak memory is the process's peak resident set (getrusage), libraries and weights included; records
are kept until the end, as `measure` keeps them. The exponent is the slope of log time on log size by least squares,
with its standard error from the residuals; "ours" is measured less bare.

An exponent of 1 is linear growth; costs that do not grow with the axis push it below, noise and caches to either side.
The limit of 1.15 would be broken by a quadratic part of 6 % of the smallest point's time where sizes span a factor of
8, that of 1.2 by 5 % where they span 16. In context the bare pass itself has a quadratic part, so ours is judged there;
elsewhere the measured time. Memory: at most 5 % more at 800 sequences than at 8; what ours adds to the bare pass's peak
at 100 layers is at most what it adds at 1, and 5 % of the bare pass's peak: one factor of W_O a layer is kept, of
`heads x d_v x d_v` numbers. The exit status is 1 where an expectation does not hold.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import side

SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128,
    "num_hidden_layers": 2,
}  # fmt: skip
REPEATS = 3
FLAT = 0.05


@dataclass(frozen=True)
class Axis:
    """What grows, and what is expected.

    Attributes:
        sizes: of the points.
        memory_from: a size at which memory alone is taken, too small to be timed; None is the first of `sizes`.
        fixed: settings of every point.
        grows: settings, by size.
        judged: which time's exponent has a limit, "measured" or "ours".
        limit: of it.
        memory: "total" or "ours" where peak memory must stay flat; None is not judged.
    """

    sizes: tuple[int, ...]
    fixed: dict[str, Any]
    grows: Callable[[int], dict[str, Any]]
    judged: str = "measured"
    limit: float = 1.15
    memory_from: int | None = None
    memory: str | None = None


def _heads(size: int) -> dict[str, Any]:
    return {"num_attention_heads": size, "num_key_value_heads": size}


AXES = {
    "context": Axis(
        (512, 1024, 2048, 4096, 8192), {"sequences": 16, "batch": 1}, lambda n: {"context": n}, "ours", limit=1.2
    ),
    "sequences": Axis(
        (100, 200, 400, 800),
        {"context": 64, "batch": 4, "num_hidden_layers": 1},
        lambda n: {"sequences": n},
        memory_from=8,
        memory="total",
    ),
    "layers": Axis(
        (12, 25, 50, 100),
        {"context": 64, "sequences": 8},
        lambda n: {"num_hidden_layers": n},
        memory_from=1,
        memory="ours",
    ),
    "heads": Axis((4, 8, 16, 32), {"context": 1024, "sequences": 12, "hidden_size": 128, "head_dim": 32}, _heads),
    "tests": Axis((32, 64, 128, 256, 512), {"context": 1024, "sequences": 16}, lambda n: {"tests": n}, "ours"),
}


def work(way: str, settings: dict[str, Any], repeats: int, threads: int) -> dict[str, Any]:
    """One process: a pass of the way, its peak memory; where measured then both in turn, the least time of each."""
    import torch

    import pavinterp as pi
    from pavinterp.measures import all_measures
    from pavinterp.sweep import forward, sweep

    torch.set_num_threads(threads)
    handle = pi.load(side.random_llama(**{name: settings[name] for name in SHAPE}))
    batch = settings["batch"]
    sequences = side.tokens(handle, "demo", settings["context"], settings["sequences"])
    tokens, stimuli = torch.from_numpy(np.stack(sequences)), side.stimuli(sequences)
    text = [m for m in all_measures() if m.stimuli == "text"]

    def bare() -> float:
        started = time.perf_counter()
        for i in range(0, len(tokens), batch):
            forward(handle, tokens[i : i + batch])
        return time.perf_counter() - started

    def measured() -> float:
        started = time.perf_counter()
        parts = sweep(handle, stimuli, text, tests=settings["tests"], layers=None, batch=batch, seed=0)
        records = [part.records for part in parts]
        assert len(records) == -(-len(tokens) // batch)
        return time.perf_counter() - started

    (bare if way == "bare" else measured)()
    peak = side.peak_mb()
    times = [(bare(), measured()) for _ in range(repeats)] if way == "measured" else []
    least = [min(each) for each in zip(*times, strict=True)] or [0.0, 0.0]
    return {"peak_mb": peak, "bare": least[0], "measured": least[1]}


def point(axis: Axis, size: int, repeats: int, threads: int) -> dict[str, float]:
    """Seconds and MB of one size; no seconds without repeats."""
    settings = {**SHAPE, "context": 64, "sequences": 4, "batch": 2, "tests": 64, **axis.fixed, **axis.grows(size)}
    bare, measured = (side.forked(work, way, settings, repeats, threads) for way in ("bare", "measured"))
    return {
        "bare": measured["bare"],
        "measured": measured["measured"],
        "ours": measured["measured"] - measured["bare"],
        "bare_mb": bare["peak_mb"],
        "measured_mb": measured["peak_mb"],
    }


def exponent(sizes: tuple[int, ...], times: list[float]) -> tuple[float, float]:
    """Slope of log time on log size and its standard error; NaN where a time is not positive, or of two points."""
    if min(times) <= 0:
        return float("nan"), float("nan")
    x, y = np.log(sizes), np.log(times)
    slope, intercept = np.polyfit(x, y, 1)
    residual = ((y - slope * x - intercept) ** 2).sum() / (len(x) - 2) if len(x) > 2 else float("nan")
    return float(slope), float(np.sqrt(residual / ((x - x.mean()) ** 2).sum()))


def judge(axis: Axis, small: dict, large: dict, exponents: dict[str, tuple[float, float]]) -> tuple[str, bool]:
    """What is expected of an axis in words, and whether it holds."""
    said, holds = f"{axis.judged}: exponent ≤ {axis.limit:g}", exponents[axis.judged][0] <= axis.limit
    if axis.memory == "total":
        said += f"; memory at most {FLAT:.0%} more"
        holds = holds and large["measured_mb"] <= (1 + FLAT) * small["measured_mb"]
    elif axis.memory == "ours":
        said += f"; ours adds at most {FLAT:.0%} of the bare peak more memory"
        added = [p["measured_mb"] - p["bare_mb"] for p in (small, large)]
        holds = holds and added[1] - added[0] <= FLAT * small["bare_mb"]
    return said, holds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two tiny points an axis, once: to see that it runs")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    for module in ("transformers.models.llama.modeling_llama", "pavinterp.measures", "pavinterp.sweep"):
        importlib.import_module(module)  # once, for all forks
    rows, points, missed = [], [], []
    for name in arguments.axes.split(","):
        axis, repeats = AXES[name], 1 if arguments.quick else arguments.repeats
        sizes = tuple(size // 8 for size in axis.sizes[:2]) if arguments.quick and name != "heads" else axis.sizes
        sizes = sizes[:2] if arguments.quick else sizes
        run = functools.partial(point, axis, threads=arguments.threads)
        found = {}
        for size in sizes:
            found[size] = run(size, repeats)
            print(f"{name} {size}: {found[size]}", file=sys.stderr, flush=True)
        first = sizes[0] if axis.memory_from is None or arguments.quick else axis.memory_from
        small, large = found.get(first) or run(first, 0), found[sizes[-1]]
        fits = {what: exponent(sizes, [p[what] for p in found.values()]) for what in ("measured", "bare", "ours")}
        said, holds = judge(axis, small, large, fits)
        missed += [] if holds else [name]
        growth = [large[what] / small[what] for what in ("measured_mb", "bare_mb")]
        slopes = [f"{slope:.2f} ± {error:.2f}".replace("nan", "–") for slope, error in fits.values()]
        rows.append(side.row(
            name, f"{sizes[0]} to {sizes[-1]}", *slopes,
            f"{growth[0]:.3f} ({growth[1]:.3f} bare, {first} to {sizes[-1]})", said,
            "not judged" if arguments.quick else "yes" if holds else "**no**",
        ))  # fmt: skip
        timed = [(size, *(f"{p[what]:.2f}" for what in ("bare", "measured")), p) for size, p in found.items()]
        if first not in found:
            timed.insert(0, (first, "–", "–", small))
        points += [side.row(name, *cells, *(f"{p[w]:.0f}" for w in ("bare_mb", "measured_mb"))) for *cells, p in timed]
    print(f"{arguments.threads} threads, least of {1 if arguments.quick else arguments.repeats} times; "
          "exponents with standard errors\n")  # fmt: skip
    print(side.header("axis", "range", "exponent of measured time", "of the bare pass's", "of ours (the difference)",
                      "peak memory, largest / smallest", "expected", "holds"))  # fmt: skip
    print("\n".join(rows))
    print("\n" + side.header("axis", "size", "bare, s", "measured, s", "bare peak, MB", "measured peak, MB"))
    print("\n".join(points))
    return 1 if missed and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
