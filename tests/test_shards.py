"""Shards: what several processes measured, put together, is what one would have measured."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from architectures import build
from test_run import stimuli
from tiny import llama, model_folder

import pavinterp as pi
from pavinterp import measuring, store
from pavinterp.errors import UserError
from pavinterp.pieces import Pieces

DOCUMENTS = [np.random.default_rng(i).integers(3, 101, 16 + 4 * (i % 3)) for i in range(11)]
SAME = {"tests": 8, "batch": 2, "progress": False}


def same_run(one, other):
    pd.testing.assert_frame_equal(one.records, other.records, check_exact=True)
    pd.testing.assert_frame_equal(one.heads(), other.heads(), check_exact=True)
    pd.testing.assert_frame_equal(one.details.tests, other.details.tests, check_exact=True)
    pd.testing.assert_frame_equal(one.details.spectra, other.details.spectra, check_exact=True)
    assert one.details.examples == other.details.examples
    times = ("created", "wall_seconds", "command", "work")  # the last only where it was asked to resume
    assert {k: v for k, v in one.manifest.items() if k not in times} == {
        k: v for k, v in other.manifest.items() if k not in times
    }


@pytest.mark.parametrize("shards", [1, 3, 40])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_shards_in_any_order_are_the_whole(name, shards, tmp_path, monkeypatch):
    text = stimuli(DOCUMENTS)
    expected = pi.measure(pi.load(build(name)), text, **SAME)
    counts = [
        pi.measure_shard(pi.load(build(name)), text, shard=(i, shards), parts=tmp_path, **SAME)
        for i in np.random.default_rng(0).permutation(np.arange(1, shards + 1)).tolist()
    ]
    assert sum(counts) == 6 + 8  # 4 + 4 + 3 texts by length in batches of 2, 16 sequences of random tokens
    (folder,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Pieces, "keep", lambda *_: pytest.fail("a batch was measured again"))
        found = pi.measure(pi.load(build(name)), text, parts=tmp_path, **SAME)
    same_run(found, expected)
    assert not folder.exists()


def test_what_no_shard_has_left_is_measured(tmp_path):
    text = stimuli(DOCUMENTS)
    pi.measure_shard(pi.load(build("llama")), text, shard=(2, 3), parts=tmp_path, **SAME)
    same_run(
        pi.measure(pi.load(build("llama")), text, parts=tmp_path, **SAME),
        pi.measure(pi.load(build("llama")), text, **SAME),
    )


@pytest.mark.parametrize("other", [{"seed": 1}, {"tests": 3}])
def test_one_folder_holds_the_parts_of_one_work(other, tmp_path):
    """A shard, or what puts them together, with another argument than the rest: named, before hours of work."""
    text = stimuli(DOCUMENTS)
    model = pi.load(build("llama"))
    pi.measure_shard(model, text, shard=(1, 2), parts=tmp_path, **SAME)
    (folder,) = tmp_path.iterdir()
    ((name, value),) = other.items()
    said = f"holds parts of other work \\(arguments.{name} {SAME.get(name, 0)} there, {value} here\\)"
    with pytest.raises(UserError, match=said):
        pi.measure(model, text, parts=tmp_path, **SAME | other)
    with pytest.raises(UserError, match=said):
        pi.measure_shard(model, text, shard=(2, 2), parts=tmp_path, **SAME | other)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("shard", [(0, 2), (3, 2), (1, 0), (1.5, 2)])
def test_no_such_shard(shard, tmp_path):
    with pytest.raises(UserError, match="shard"):
        pi.measure_shard(pi.load(build("llama")), stimuli(DOCUMENTS), shard=shard, parts=tmp_path, **SAME)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="finished parts cannot be kept in"):
        pi.measure_shard(
            pi.load(build("llama")), stimuli(DOCUMENTS), shard=(1, 2), parts=tmp_path / "file" / "x", **SAME
        )


@pytest.mark.slow
def test_shards_by_the_command(tmp_path):
    """As a batch scheduler would: one process a shard, then the report; its files are those of a process alone."""
    model = model_folder(tmp_path / "model", llama())
    command = [sys.executable, "-m", "pavinterp", "report", str(model), "--sequences", "9", "--context", "24"]
    command += ["--batch", "2", "--quiet"]
    environment = os.environ | {"PAVINTERP_CACHE": str(tmp_path / "cache")}
    parts = ["--parts", str(tmp_path / "parts")]
    shards = [
        subprocess.Popen([*command, *parts, "--shard", f"{i}/3"], env=environment, stdout=subprocess.PIPE, text=True)
        for i in (1, 2, 3)
    ]
    said = [shard.communicate()[0] for shard in shards]
    assert [shard.returncode for shard in shards] == [0, 0, 0]
    assert all("without --shard the same command takes them up" in line for line in said)
    for where, more in (("together", parts), ("alone", [])):
        subprocess.run([*command, *more, "--out", str(tmp_path / where)], env=environment, check=True)
    one, other = tmp_path / "together", tmp_path / "alone"
    files = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert files == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    for path in files:
        if path.suffix in (".parquet", ".csv", ".json") and path.name != "manifest.json":
            assert (one / path).read_bytes() == (other / path).read_bytes(), path
    assert store.read_manifest(one)["certificate"] == store.read_manifest(other)["certificate"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shard", "0/2", "--parts", "x"], "give i/N"),
        (["--shard", "3/2", "--parts", "x"], "give i/N"),
        (["--shard", "a", "--parts", "x"], "give i/N"),
        (["--shard", "1/2"], "give --parts FOLDER"),
    ],
)
def test_shards_that_make_no_sense(words, said, capsys):
    from pavinterp.cli import main

    with pytest.raises(SystemExit) as end:
        main(["measure", "demo", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_defaults_are_those_of_measure():
    import inspect

    one, other = (inspect.signature(f).parameters for f in (measuring.measure, measuring.measure_shard))
    for name in set(one) & set(other) - {"parts"}:
        assert one[name].default == other[name].default, name
