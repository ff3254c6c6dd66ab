"""kill -9 at random moments of a whole report, then the same command again: its files are those of a run left alone."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from tiny import llama, model_folder

import pavinterp.store as store

KILLS = int(os.environ.get("PAVINTERP_KILLS", "5"))  # about 15 s each beside another test
MODEL_CODE = "transformers.models.llama.modeling_llama"
PROCESSES = multiprocessing.get_context("forkserver")  # each starts with torch and pavinterp imported
PROCESSES.set_forkserver_preload(
    ["pavinterp.cli", "pavinterp.report", "pavinterp.terminal", "matplotlib.pyplot", MODEL_CODE]
)


def report(model: Path, out: Path, log: Path) -> None:
    """The command, as its own process would run it."""
    import sys

    import torch

    from pavinterp.cli import main

    torch.set_num_threads(1)
    sys.stdout = sys.stderr = log.open("a")
    size = ["--sequences", "64", "--context", "48", "--batch", "1", "--tests", "8"]
    main(["report", str(model), "--out", str(out), *size])


def start(model: Path, out: Path) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=report, args=(model, out, out.with_suffix(".log")))
    process.start()
    return process


def files(folder: Path) -> dict[str, bytes]:
    """What a run wrote, without its command and times."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found["manifest.json"]
    page = found["index.html"].splitlines()
    found["index.html"] = b"\n".join(
        line for line in page if b"pavinterp report" not in line and b", measured in" not in line
    )
    return found


@pytest.mark.slow
def test_a_report_that_is_killed_and_killed_again_ends_as_one_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path / "cache"))
    model = model_folder(tmp_path / "model", llama())
    took = []
    for _ in range(2):  # the first imports what was not preloaded
        began = time.monotonic()
        alone = start(model, tmp_path / f"alone{len(took)}")
        alone.join()
        assert alone.exitcode == 0, (tmp_path / f"alone{len(took)}.log").read_text()
        took.append(time.monotonic() - began)
    expected = files(tmp_path / "alone0")
    moments = took[1] * (np.arange(KILLS) + np.random.default_rng().uniform(size=KILLS)) / KILLS  # spread over the run
    for kill, moment in enumerate([*moments, None]):  # and once for certain while batches are measured
        out = tmp_path / f"run{kill}"
        process = start(model, out)
        if moment is None:
            while process.is_alive() and len(list(tmp_path.glob("cache/unfinished/*/*.part"))) < 5:
                time.sleep(0.001)
        process.join(moment or 0)
        process.kill()
        process.join()
        when = "in the midst of measuring" if moment is None else f"after {moment:.2f} of {took[1]:.2f} s"
        began = time.monotonic()
        if not (out / "manifest.json").is_file():
            again = start(model, out)
            again.join()
            assert again.exitcode == 0, f"killed {when}: {out.with_suffix('.log').read_text()}"
        print(f"killed {when}, the rest took {time.monotonic() - began:.2f} s")
        assert files(out) == expected, f"killed {when}"
        assert store.read_manifest(out)["certificate"] == store.read_manifest(tmp_path / "alone0")["certificate"]
        assert not list(tmp_path.glob(".run*")), f"killed {when}"
    assert "goes on where" in out.with_suffix(".log").read_text()
    assert not list((tmp_path / "cache" / "unfinished").iterdir())
