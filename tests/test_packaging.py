"""What is installed and how quickly it answers: package data, public names, pinned versions, light imports."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import pavinterp

ROOT = Path(__file__).parent.parent
PACKAGE = Path(pavinterp.__file__).parent
HEAVY = {
    "torch", "transformers", "transformer_lens", "matplotlib", "seaborn", "pandas", "numpy", "scipy", "pyarrow",
    "jinja2", "datasets", "gguf", "rich",
}  # fmt: skip


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def heavy_modules_after(code: str) -> set[str]:
    code += "\nimport sys, json; print(json.dumps([name for name in sys.modules if '.' not in name]), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import pavinterp",
        "import pavinterp; dir(pavinterp); pavinterp.__version__; pavinterp.UserError",
        "import pavinterp.cli",
        *(
            f"import pavinterp.cli\ntry: pavinterp.cli.main({arguments})\nexcept SystemExit: pass"
            for arguments in (["--help"], ["report", "--help"], ["--version"], ["nonsense"], ["report", "--tests", "0"])
        ),
        # what is wrong with --out is found before anything heavy is there
        "import pavinterp.cli\ntry: pavinterp.cli.main(['report', '--out', '/'])\nexcept SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str) -> None:
    assert heavy_modules_after(code) == set()


def test_every_public_name_is_there() -> None:
    assert set(pavinterp.__all__) >= {
        "load", "corpus", "repeated_random_tokens", "tokenise", "measure", "Run", "plots", "describe", "UserError",
        "__version__",
    }  # fmt: skip
    for name in pavinterp.__all__:
        assert getattr(pavinterp, name) is not None
        assert name in dir(pavinterp)
    with pytest.raises(AttributeError, match="has no attribute 'meassure'"):
        pavinterp.meassure  # noqa: B018


def test_names_known_to_type_checkers_are_those_that_run() -> None:
    source = (PACKAGE / "__init__.py").read_text()
    declared = dict(re.findall(r"from pavinterp\.(\w+) import (\w+) as \2", source))
    found = {(module, name) for module, name in re.findall(r"from pavinterp\.(\w+) import (\w+) as \2", source)}
    assert declared
    assert found | {("plots", "plots")} == {(module, name) for name, module in pavinterp._HOME.items()}


def test_the_version_is_said_alike_everywhere() -> None:
    assert version("pavinterp") == pavinterp.__version__
    assert f"\nversion: {pavinterp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {pavinterp.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_file_of_the_package_is_installed(project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]["pavinterp"]
    covered = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    for path in PACKAGE.rglob("*"):
        if path.is_dir() or path.suffix in (".py", ".pyc"):
            continue
        assert path in covered, f"{path.relative_to(PACKAGE)} matches no package-data pattern of pyproject.toml"
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert (folder / "__init__.py").exists(), f"{folder.relative_to(PACKAGE.parent)} would not be installed"


def test_every_pattern_of_package_data_finds_something(project: dict[str, Any]) -> None:
    for pattern in project["tool"]["setuptools"]["package-data"]["pavinterp"]:
        assert any(PACKAGE.glob(pattern)), pattern


def requirements(project: dict[str, Any]) -> list[Requirement]:
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    found = [Requirement(line) for group in groups for line in group]
    return [requirement for requirement in found if requirement.name != "pavinterp"]


def test_constraints_pin_every_requirement_within_its_range(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert all(re.fullmatch(r"[\w.]+", pin) for pin in pins.values()), "no local versions, hosts or paths"
    pins = {normal(name): pin for name, pin in pins.items()}
    assert pins["torch"] == "2.13.0"
    for requirement in requirements(project):
        assert requirement.specifier.contains(pins[normal(requirement.name)]), requirement


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_import_of_the_package_is_a_requirement(project: dict[str, Any]) -> None:
    known = {normal(requirement.name).replace("-", "_") for requirement in requirements(project)}
    known |= {"pavinterp", "huggingface_hub", "tokenizers", "markupsafe"}  # which transformers and jinja2 require
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "pavinterp"] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                assert name in known, f"{path.relative_to(PACKAGE)}:{node.lineno} imports {name}"


def test_ci_runs_what_a_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


def test_the_licence_is_in_full() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
