"""Many models in one call: a folder each, one that fails stops no other, the same call again does what is missing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import llama, model_folder

from pavinterp import cli, jobs
from pavinterp.errors import UserError
from pavinterp.many import jobs_of, read_models

SIZE = ["--sequences", "12", "--context", "32", "--batch", "2", "--tests", "8", "-q"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of two tiny models and one that is not there between them."""
    folder = tmp_path_factory.mktemp("models")
    for i in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            model_folder(folder / f"m{i}", llama())
    lines = ["# tiny ones", f"{folder}/m0", "", f"{folder}/not-there  # gone", f"{folder}/m1"]
    (folder / "models.txt").write_text("\n".join(lines))
    return folder / "models.txt"


def sweep(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["sweep", *map(str, words), *SIZE])
    assert isinstance(end.value.code, int)
    return end.value.code


def report(*words: object) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["report", *map(str, words), *SIZE])
    assert end.value.code == 0


def same_files(one: Path, other: Path) -> None:
    """Every file of two runs but those that say when and by what command they were made."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    for name in names:
        if str(name) not in ("manifest.json", "index.html"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_each_model_has_the_run_that_it_would_have_alone(models, tmp_path, capsys):
    assert sweep(models, "--out", tmp_path / "all") == 2
    out, err = capsys.readouterr()
    assert "1 of 3 models failed: the same command tries them again" in err
    assert "not-there: no folder" in err
    assert [line.split()[1] for line in out.splitlines()[2:5]] == ["measured", "failed", "measured"]
    table = pd.read_csv(tmp_path / "all" / "models.csv").set_index("model")
    assert table["status"].tolist() == ["measured", "failed", "measured"]
    assert table.loc[f"{models.parent}/m0", "heads"] == 8
    assert "no folder" in table.loc[f"{models.parent}/not-there", "why"]
    for name in ("m0", "m1"):
        report(models.parent / name, "--out", tmp_path / name)
        same_files(tmp_path / "all" / name, tmp_path / name)
    assert sorted(os.listdir(tmp_path / "all")) == ["m0", "m1", "models.csv", "sweep.json"]


def test_the_same_call_again_measures_what_is_missing(models, tmp_path, monkeypatch, capsys):
    sweep(models, "--out", tmp_path / "all", "--no-pages")
    assert not (tmp_path / "all" / "m0" / "index.html").exists()
    made = (tmp_path / "all" / "m0" / "manifest.json").read_bytes()
    for path in (tmp_path / "all" / "m1").iterdir():
        path.unlink()
    (tmp_path / "all" / "m1").rmdir()
    capsys.readouterr()
    assert sweep(models, "--out", tmp_path / "all", "--no-pages", "--json") == 2
    found = json.loads(capsys.readouterr().out)["models"]
    assert [row["status"] for row in found] == ["there already", "failed", "measured"]
    assert (tmp_path / "all" / "m0" / "manifest.json").read_bytes() == made
    for more, said in (
        (["--seed", "1"], "seed 0 there, 1 here"),
        (["--context", "24"], "context 32 there, 24 here"),
        ([], "with_pages False there, True here"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(
                ["sweep", str(models), "--out", str(tmp_path / "all"), *SIZE, *more, *(["--no-pages"] * bool(more))]
            )
        assert end.value.code == 2
        assert f"holds a sweep with other arguments ({said})" in capsys.readouterr().err
    assert sweep(models, "--out", tmp_path / "all", "--no-pages", "--overwrite") == 2
    assert (tmp_path / "all" / "m0" / "manifest.json").read_bytes() != made


def test_a_run_that_no_sweep_made_is_not_taken_for_one(models, tmp_path, capsys):
    report(models.parent / "m0", "--out", tmp_path / "m0")
    assert sweep(models, "--out", tmp_path) == 2
    assert "m0 exists (made by `pavinterp report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "names no model"),
        ("# only this", "names no model"),
        ("gpt2 --context 12", "line 1: give MODEL, or MODEL --revision NAME"),
        ("gpt2\n'half", "line 2: No closing quotation"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_lists_that_are_none(content, said, tmp_path):
    (tmp_path / "list").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said):
        read_models(tmp_path / "list")
    with pytest.raises(UserError, match="cannot be read"):
        read_models(tmp_path / "no list")


def test_checkpoints_have_folders_of_their_own(tmp_path):
    (tmp_path / "list").write_text("a/pythia --revision step1\na/pythia --revision step2\na/pythia\n")
    like = jobs.Job(options={"corpus": "demo"}, measure={}, folder=tmp_path)
    found = jobs_of(read_models(tmp_path / "list"), like)
    assert [job.folder.name for job in found] == ["pythia-step1", "pythia-step2", "pythia"]
    assert [job.options["revision"] for job in found] == ["step1", "step2", None]
    with pytest.raises(UserError, match="two models would be written to"):
        jobs_of([{"model": "a/x", "revision": None}, {"model": "b/x", "revision": None}], like)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--engine", "cloud"], "choose local or ray"),
        (["--workers", "2"], "are of --engine ray"),
        (["--engine", "ray", "--shard", "1/2", "--parts", "x"], "Ray makes the shares itself"),
    ],
)
def test_engines_that_make_no_sense(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["report", "demo", *words])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def cluster():
    """A real local cluster of two cores; its workers run pavinterp as this process does."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_cluster_gives_what_one_process_gives(cluster, models, tmp_path, capsys):
    assert sweep(models, "--out", tmp_path / "ray", "--engine", "ray", "--workers", "2", "--shards", "3") == 2
    assert "not-there: no folder" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "ray")) == ["m0", "m1", "models.csv", "sweep.json"]
    report(models.parent / "m0", "--out", tmp_path / "m0", "--engine", "ray", "--workers", "2")
    assert sorted(os.listdir(tmp_path)) == ["m0", "ray"]
    for name in ("m0", "m1"):
        report(models.parent / name, "--out", tmp_path / "alone" / name)
        same_files(tmp_path / "ray" / name, tmp_path / "alone" / name)
    same_files(tmp_path / "m0", tmp_path / "alone" / "m0")


@pytest.mark.slow
def test_a_worker_that_is_killed_amid_its_share_costs_a_batch(cluster, models, tmp_path, monkeypatch):
    """kill -9 of the process that measures, when the job's second batch is there; what is finished stays."""
    from threading import Thread

    import psutil

    parts = tmp_path / "parts"
    killed: list[int] = []

    def kill() -> None:
        while not killed:
            if len(list(parts.glob("*/*.part"))) >= 2:
                for process in psutil.process_iter(["cmdline"]):
                    if "ray::Worker.do" in " ".join(process.info["cmdline"] or []):
                        process.send_signal(signal.SIGKILL)
                        killed.append(process.pid)
                        break
            time.sleep(0.005)

    killer = Thread(target=kill, daemon=True)
    killer.start()
    more = ["--sequences", "40", "--batch", "1", "--parts", parts]  # the later of two counts
    report(models.parent / "m0", "--out", tmp_path / "ray", *SIZE, *more, "--engine", "ray", "--workers", "2")
    assert len(killed) == 1
    report(models.parent / "m0", "--out", tmp_path / "alone", *SIZE, *more)
    same_files(tmp_path / "ray", tmp_path / "alone")


def test_without_ray_one_line_says_so(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    assert sweep(models, "--out", tmp_path / "all", "--engine", "ray") == 2
    assert "Ray is not installed: pip install 'pavinterp[ray]'" in capsys.readouterr().err
