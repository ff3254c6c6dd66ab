"""The benchmarks run and print their tables; other ways to a head's load agree with pavinterp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import pavinterp as pi
from pavinterp.measuring import measure

BENCH = Path(__file__).parent / "bench"
sys.path.insert(0, str(BENCH))
SMALL = ["--model=demo", "--context=64", "--sequences=2", "--tests=8", "--rounds=1", "--threads=1"]


def table(script: str, *options: str) -> list[list[str]]:
    """Cells of every row of the tables that a script prints, headers and rules left out."""
    command = [sys.executable, str(BENCH / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.slow
def test_overhead_prints_its_table():
    header, row = table("bench_overhead.py", *SMALL)
    assert len(row) == len(header)
    assert row[:4] == ["demo", "64", "2", "2"]
    assert "to" in row[6]


@pytest.mark.slow
def test_side_by_side_prints_its_table_and_says_how_a_way_failed():
    header, *rows = table("bench_side_by_side.py", *SMALL, "--ways=pavinterp,eager", "--limit-gb=64")
    assert [row[0] for row in rows] == ["bare", "pavinterp", "eager"]
    assert all(len(row) == len(header) and float(row[-1]) > 1 for row in rows[1:])
    _, row = table("bench_side_by_side.py", *SMALL, "--ways=", "--limit-gb=1")  # less than the libraries take
    assert "memory" in row[1].lower()


@pytest.mark.slow
def test_growth_prints_its_tables():
    header, row, *points = table("bench_growth.py", "--quick", "--axes=sequences", "--threads=1")
    assert len(row) == len(header)
    assert row[0] == "sequences"
    assert row[-1] == "not judged"
    assert len(points) == 3  # with their header


@pytest.mark.parametrize("make", [tiny.llama, tiny.gemma3, tiny.gpt2])
def test_the_other_ways_compute_the_same_load(make):
    import competitors

    tokens = np.random.default_rng(0).integers(1, tiny.VOCABULARY, (2, 47))  # odd: the median is a position's own
    records = measure(make(), list(tokens), context=47, tests=None, examples=False, bos="never").records
    text = records[records["stimuli"] == "text"].sort_values(["layer", "sequence", "head"])
    for way in (competitors.eager, competitors.lens):
        with torch.no_grad():
            found = way(pi.load(make()))(torch.from_numpy(tokens)).median(-1).values
        np.testing.assert_allclose(found.flatten(), text["effective_load"], rtol=1e-3)
