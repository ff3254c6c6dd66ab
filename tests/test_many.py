"""Many models in one call: a folder each, one that fails stops no other, the same call again does what is missing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import llama, model_folder

from pavinterp import cli, jobs, store
from pavinterp.errors import UserError
from pavinterp.many import jobs_of, read_models

SIZE = ["--sequences", "12", "--context", "32", "--batch", "2", "--tests", "8", "-q"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of two tiny models and one that is not there between them."""
    folder = tmp_path_factory.mktemp("models")
    for i in range(2):
        model = llama()
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.weight.mul_(1 + i)
        model_folder(folder / f"m{i}", model)
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
    assert "1 of 3 models failed; when what is said of each is mended" in err
    assert "not-there: no folder" in err
    assert [line.split()[1] for line in out.splitlines()[2:5]] == ["measured", "failed", "measured"]
    table = pd.read_csv(tmp_path / "all" / "models.csv").set_index("model")
    assert table["status"].tolist() == ["measured", "failed", "measured"]
    assert table.loc[f"{models.parent}/m0", "heads"] == 8
    assert "no folder" in table.loc[f"{models.parent}/not-there", "why"]
    for name in ("m0", "m1"):
        report(models.parent / name, "--out", tmp_path / name)
        same_files(tmp_path / "all" / name, tmp_path / name)
    assert sorted(os.listdir(tmp_path / "all")) == ["m0", "m1", "models.csv"]


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
        (["--no-pages", "--seed", "1"], "seed 0 there, 1 here"),
        (["--no-pages", "--context", "24"], "context 32 there, 24 here"),
        ([], "with_pages False there, True here"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["sweep", str(models), "--out", str(tmp_path / "all"), *SIZE, *more])
        assert end.value.code == 2
        assert f"m0 is of a sweep with other arguments ({said})" in capsys.readouterr().err
    assert sweep(models, "--out", tmp_path / "all", "--no-pages", "--overwrite") == 2
    assert (tmp_path / "all" / "m0" / "manifest.json").read_bytes() != made


def seeds(folder: Path) -> list[int]:
    return [store.read_manifest(path.parent)["seed"] for path in sorted(folder.glob("*/manifest.json"))]


def test_runs_of_two_sweeps_are_never_taken_for_one(models, tmp_path, capsys):
    """A shorter list with --overwrite leaves the other model's old run, which the longer list then names."""
    (tmp_path / "one.txt").write_text(f"{models.parent}/m0\n")
    (tmp_path / "two.txt").write_text(f"{models.parent}/m0\n{models.parent}/m1\n")
    where = ["--out", tmp_path / "all", "--no-pages"]
    assert sweep(tmp_path / "two.txt", *where) == 0
    assert sweep(tmp_path / "one.txt", *where, "--seed", "1", "--overwrite") == 0
    assert seeds(tmp_path / "all") == [1, 0]
    assert sweep(tmp_path / "two.txt", *where, "--seed", "1") == 2
    assert "m1 is of a sweep with other arguments (seed 0 there, 1 here)" in capsys.readouterr().err
    assert sweep(tmp_path / "two.txt", *where, "--seed", "1", "--overwrite") == 0
    assert seeds(tmp_path / "all") == [1, 1]


@pytest.mark.parametrize("what", ["weights", "name", "text"])
def test_what_was_changed_meanwhile_is_not_there_already(what, models, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be that is the question " * 40)
    shutil.copytree(models.parent / "m0", tmp_path / "here" / "m")
    (tmp_path / "list.txt").write_text(f"{tmp_path}/here/m\n")
    call = [tmp_path / "list.txt", "--out", tmp_path / "all", "--no-pages", "--corpus", tmp_path / "text.txt"]
    assert sweep(*call) == 0
    assert sweep(*call) == 0
    assert "there already" in capsys.readouterr().out
    if what == "text":
        (tmp_path / "text.txt").write_text("whether tis nobler in the mind to suffer " * 40)
    elif what == "weights":
        shutil.copytree(models.parent / "m1", tmp_path / "here" / "m", dirs_exist_ok=True)
    else:
        shutil.copytree(models.parent / "m1", tmp_path / "there" / "m")
        (tmp_path / "list.txt").write_text(f"{tmp_path}/there/m\n")
    assert sweep(*call) == 2
    assert "m is of other weights, text or versions: --overwrite measures them again" in capsys.readouterr().err
    assert sweep(*call, "--overwrite") == 0


def test_files_of_somebody_else_stay(models, tmp_path, capsys):
    (tmp_path / "models.csv").write_text("mine")
    for more in ([], ["--overwrite"]):
        assert sweep(models, "--out", tmp_path, *more) == 2
        assert "models.csv was not written by a sweep and is not replaced" in capsys.readouterr().err
    assert sweep(models, "--out", "") == 2
    assert (tmp_path / "models.csv").read_text() == "mine"
    assert os.listdir(tmp_path) == ["models.csv"]


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
        ("gpt2\n'half", "line 2: give MODEL"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_lists_that_are_none(content, said, tmp_path):
    (tmp_path / "list").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=said):
        read_models(tmp_path / "list")
    with pytest.raises(UserError, match="cannot be read"):
        read_models(tmp_path / "no list")


def test_lines_of_a_list(tmp_path):
    lines = ["C:\\models\\gpt2  # here", "'a b/c'", "/home/o'b/m --revision v1", '"x y" --revision main', "a#b"]
    (tmp_path / "list").write_text("\n".join(lines))
    assert [(line["model"], line["revision"]) for line in read_models(tmp_path / "list")] == [
        ("C:\\models\\gpt2", None),
        ("a b/c", None),
        ("/home/o'b/m", "v1"),
        ("x y", "main"),
        ("a#b", None),
    ]


def test_a_mistyped_text_is_said_once(models, tmp_path, capsys):
    assert sweep(models, "--out", tmp_path / "out", "--corpus", tmp_path / "none.txt") == 2
    assert capsys.readouterr().err.count("cannot read corpus") == 1


def test_checkpoints_have_folders_of_their_own(tmp_path):
    (tmp_path / "list").write_text("a/pythia --revision step1\na/pythia --revision step2\na/pythia\n")
    options = {"corpus": "demo", "text_field": "text", "max_documents": None, "dtype": "float32", "tokenizer": None}
    like = jobs.Job(options=options, measure={}, folder=tmp_path)
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
    assert sorted(os.listdir(tmp_path / "ray")) == ["m0", "m1", "models.csv"]
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
