"""`pavinterp doctor`, and shell completion: what a new installation is looked over with."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pavinterp as pi
from pavinterp import cli, doctor

RUN = "import sys; sys.argv = ['pavinterp', *sys.argv[1:]]; from pavinterp.__main__ import main; main()"


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments, "--json"])
    assert isinstance(ended.value.code, int)
    return ended.value.code, json.loads(capsys.readouterr().out)


def of(found: dict[str, Any], part: str) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in found["findings"] if row["part"] == part}


def test_a_whole_installation_is_healthy_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examined(capsys)
    assert (code, found["healthy"], found["pavinterp"]) == (0, True, pi.__version__)
    packages = of(found, "package")
    assert packages["torch"]["detail"] == torch.__version__
    assert packages["transformers"]["detail"] == transformers.__version__
    assert all(row["status"] == "ok" for row in packages.values())
    assert {"transformer-lens", "ray", "peft", "datasets"} <= {*of(found, "optional")}
    assert "cores" in of(found, "device")["cpu"]["detail"]
    assert len(of(found, "device")) == 1 + torch.cuda.device_count() + torch.backends.mps.is_available()
    assert "writable" in of(found, "cache")[os.environ["PAVINTERP_CACHE"]]["detail"]
    assert "offline" in next(iter(of(found, "hub").values()))["detail"]  # as the tests are
    printed = doctor.lines(found)
    assert len(printed) == 2 + len(found["findings"])
    assert printed[-1] == "all that is needed works"


def test_what_is_missing_or_too_old_says_what_pip_must_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = doctor.version

    def other(name: str) -> str:
        if name in ("scipy", "ray"):
            raise PackageNotFoundError(name)
        return "4.57.0" if name == "transformers" else real(name)

    monkeypatch.setattr(doctor, "version", other)
    code, found = examined(capsys, "--no-network")
    assert (code, found["healthy"]) == (2, False)
    assert of(found, "package")["scipy"]["advice"] == "pip install 'scipy<2,>=1.14'"
    assert "4.57.0 is not" in of(found, "package")["transformers"]["detail"]
    ray = of(found, "optional")["ray"]
    assert (ray["status"], ray["advice"]) == ("absent", "pip install 'pavinterp[ray]'")
    assert doctor.lines(found)[-1] == "broken: 2, see above"


def test_a_package_that_cannot_be_imported_and_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # what makes an import fail
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path / "file" / "cache"))
    code, found = examined(capsys)
    assert code == 2
    assert "cannot be imported" in of(found, "package")["pyarrow"]["detail"]
    assert "PAVINTERP_CACHE" in of(found, "cache")[str(tmp_path / "file" / "cache")]["advice"]


def test_no_answer_of_the_hub_is_told_and_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    hub = [row for row in doctor.doctor()["findings"] if row["part"] == "hub"]
    assert hub[0]["status"] == "absent"
    assert "no answer" in hub[0]["detail"]
    assert "check network" in hub[0]["advice"]
    monkeypatch.setattr(doctor.urllib.request, "urlopen", lambda *_, **__: io.BytesIO())
    assert [row["status"] for row in doctor.doctor()["findings"] if row["part"] == "hub"] == ["ok"]


def test_every_optional_package_names_something_that_pip_can_install() -> None:
    from importlib.metadata import metadata

    extras = metadata("pavinterp").get_all("Provides-Extra") or []
    for _, target in doctor.OPTIONAL.values():
        if target.startswith("pavinterp["):
            assert target.removeprefix("pavinterp[").removesuffix("]") in extras


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_and_options(shell: str) -> None:
    script = subprocess.run([sys.executable, "-c", RUN, "--show-completion", shell], capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    assert "_PAVINTERP_COMPLETE" in script.stdout

    def completed(typed: str) -> str:
        given = {
            "_PAVINTERP_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split()) - 1),
            "_TYPER_COMPLETE_ARGS": typed,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        return subprocess.run(
            [sys.executable, "-c", RUN], capture_output=True, text=True, env=os.environ | given
        ).stdout

    assert "report" in completed("pavinterp rep")
    assert "redundancy" not in completed("pavinterp rep")
    assert "--context" in completed("pavinterp report --con")


def test_completion_is_installed_where_the_shell_looks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "--install-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "_PAVINTERP_COMPLETE" in next(tmp_path.rglob("pavinterp.sh")).read_text()
    assert "pavinterp.sh" in (tmp_path / ".bashrc").read_text()
