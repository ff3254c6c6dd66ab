"""What other packages add: the recipes of docs/extend.md, installed as a package and used; what is broken is left out.

Each package is a folder on the path of a process of its own, with the metadata that an installation would write.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pandas as pd
import pytest
import torch

import pavinterp as pi
from pavinterp import store

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def install(folder: Path, name: str, files: dict[str, str], points: dict[str, dict[str, str]]) -> None:
    """What `pip install --target FOLDER` of such a package leaves there."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, named in points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in named.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def python(code: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Code in a new process that finds these folders' packages."""
    path = os.pathsep.join([*map(str, paths), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def command(*arguments: str, paths: tuple[Path, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    return python(f"from pavinterp.cli import main; main({list(arguments)})", *paths, **environment)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of docs/extend.md, made of all code blocks there, and installed."""
    folder = tmp_path_factory.mktemp("recipes")
    text = (ROOT / "docs" / "extend.md").read_text()
    blocks = dict(BLOCK.findall(text))
    assert len(blocks) == len(re.findall(r"^```(?:python|toml)$", text, re.MULTILINE)) == 6
    project = tomllib.loads(blocks.pop("pyproject.toml"))["project"]
    install(folder, project["name"], blocks | {"my_heads/__init__.py": ""}, project["entry-points"])
    return folder


def test_a_measure_of_another_package_is_in_records_tables_and_pages(recipes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small = ("--context", "48", "--sequences", "8", "--tests", "all", "--layers", "0")
    done = command("report", *small, "--out", str(run), "--pages", "0", "--quiet", paths=(recipes,))
    assert done.returncode == 0, done.stderr
    told = json.loads((run / "manifest.json").read_text())
    assert told["versions"]["my-heads"] == "1.0"
    assert "reach" in (run / "index.html").read_text()
    assert "Mean distance of the CSs that a test reads" in (run / "index.html").read_text()
    heads = store.read_heads(run)
    assert ((heads["reach_lo"] <= heads["reach"]) & (heads["reach"] <= heads["reach_hi"])).all()
    records = pd.read_parquet(run / "records.parquet").query("stimuli == 'text' and layer == 0")
    expected = []  # witness: position by position, from the model's own attention weights
    handle = pi.load("demo")
    model = handle.model
    model.set_attn_implementation("eager")
    text = pi.tokenise(pi.corpus("demo"), handle.tokenizer, context=48, sequences=8)
    with torch.no_grad():
        for ids in text.tokens:
            a = model(torch.from_numpy(ids)[None], output_attentions=True).attentions[0][0]
            by_test = [sum((t - j) * a[:, t, j] for j in range(t + 1)) for t in range(48)]
            expected.append(torch.stack(by_test).sort(0).values[23])  # the median that has half the weight at or below
    got = records.sort_values(["sequence", "head"])["reach"].to_numpy()
    assert got == pytest.approx(torch.stack(expected).flatten().numpy(), rel=1e-3, abs=1e-4)


def test_a_rule_and_a_paradigm_of_another_package_run_by_their_names(recipes: Path, tmp_path: Path) -> None:
    rules = "rules demo --rules hyperbolic,hebbian --context 32 --sequences 4 --tests 8 --layers 0 --json --quiet"
    condition = "condition demo --paradigms summation --draws 4 --layouts arrow --json --quiet"
    code = f"""
from contextlib import redirect_stdout, suppress
from pavinterp.cli import main
for name, words in {{"rules": {rules!r}, "condition": {condition!r}}}.items():
    with open({str(tmp_path)!r} + "/" + name, "w") as file, redirect_stdout(file), suppress(SystemExit):
        main(words.split())
"""
    done = python(code, recipes)
    assert not done.stderr
    rows = json.loads((tmp_path / "rules").read_text())["rules"]
    assert {row["rule"] for row in rows} == {"hyperbolic", "hebbian"}
    assert any("half_life=" in row["parameter"] for row in rows)
    assert {row["paradigm"] for row in json.loads((tmp_path / "condition").read_text())["effects"]} == {"summation"}


PATHS = """
import pavinterp as pi
from pavinterp import store
from architectures import build
from pavinterp.capture.paths import on_path, path_of
handle = pi.load(build("bloom"))
print(path_of(on_path(handle)), path_of(on_path(pi.load(build("llama")))))
"""


def test_an_architecture_of_another_package_is_captured_and_nothing_else_by_it(recipes: Path) -> None:
    verified = """
found = pi.verify(handle, length=24)
print(found["passed"], found["agreement"] < 1e-4)
"""
    done = python(PATHS + verified, recipes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["module_hooks", "attention_interface", "True", "True"]
    done = python(PATHS, recipes, PAVINTERP_PLUGINS="0")
    assert done.stdout.split() == ["transformer_lens", "attention_interface"], done.stderr


BROKEN = """
import torch
from pavinterp.measures import Column


class Load:
    name, stimuli, columns = "load", "text", (Column("other", "", ""),)


class Taken:
    name, stimuli, columns = "taken", "text", (Column("d_eff", "", ""),)


class Shape:
    name, stimuli, columns = "shape", "text", (Column("odd", "", "", "mean"),)

    def __call__(self, trials):
        return {"odd": torch.zeros(3)}


class Late:
    # works where it is tried, and fails on real trials
    name, stimuli, columns = "late", "text", (Column("late", "", ""),)

    def __call__(self, trials):
        if len(trials.tokens) > 20:
            raise KeyError("x")
        return {"late": torch.zeros(trials.heads)}


def hebbian(*pairs, **more):
    raise AssertionError


def future(keys, values, queries, positions, *, first=None):
    return queries @ keys.mT @ values


def squares(keys, values, queries, positions, *, first=None):
    from pavinterp.theory.rules import RULES

    return RULES["hebbian"](keys, values**2, queries, positions, first=first)


def exits():
    raise SystemExit(3)


ARCHITECTURES, capture = ("FalconModel",), print
"""


def test_what_is_broken_is_left_out_in_one_line_that_names_its_package(tmp_path: Path) -> None:
    points = {
        "pavinterp.measures": {name.lower(): f"broken:{name}" for name in ("Load", "Taken", "Shape")}
        | {"gone": "no_such_module:X", "Bad-Name": "broken:Late"},
        "pavinterp.rules": {name: f"broken:{name}" for name in ("hebbian", "future", "squares")},
        "pavinterp.paradigms": {"blocking": "broken:exits", "exits": "broken:exits"},
        "pavinterp.architectures": {"falcon_too": "broken", "falcon": "broken"},
    }
    install(tmp_path, "broken-things", {"broken.py": BROKEN}, points)
    code = """
import json, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from pavinterp.capture.paths import added_families
    from pavinterp.experiments.all_rules import all_rules
    from pavinterp.measures import added_measures
    from pavinterp.paradigms import available, builtin
    from pavinterp.theory.rules import RULES
    rest = [added_measures() == (), all_rules() == RULES, available() == builtin(), added_families() == {}]
print(json.dumps([rest, [str(one.message) for one in seen]]))
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    rest, lines = json.loads(done.stdout)
    assert rest == [True] * 4
    assert all("of package broken-things 1.0 is left out of the " in line and "\n" not in line for line in lines)
    said = {line.split("'")[1]: line for line in lines}
    assert len(said) == len(lines) == sum(map(len, points.values()))
    for name, words in {
        "load": "pavinterp has one of that name",
        "taken": "there is a column d_eff already",
        "shape": "odd must be floating-point [4, 12] for random trials, got torch.float32 [3]",
        "gone": "ModuleNotFoundError",
        "Bad-Name": "names are of small letters",
        "hebbian": "pavinterp has one of that name",
        "future": "from no others",
        "squares": "linear in each dimension of the USs",
        "exits": "SystemExit",
        "falcon_too": "FalconModel is captured already",
    }.items():
        assert words in said[name]


def test_a_measure_that_fails_later_ends_the_run_in_one_line(tmp_path: Path) -> None:
    install(tmp_path, "late-things", {"broken.py": BROKEN}, {"pavinterp.measures": {"late": "broken:Late"}})
    small = ("measure", "--context", "32", "--sequences", "2", "--layers", "0", "--out", str(tmp_path / "run"), "-q")
    done = command(*small, paths=(tmp_path,))
    assert done.returncode == 2
    assert "measure 'late' of package late-things 1.0 failed in layer 0 (KeyError" in done.stderr
    assert done.stderr.count("\n") == 1
