"""What a test meets where a real model cannot be had."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import real_models


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models, and a download that fails."""

    def fail(command: list[str], check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(real_models, "FOLDER", tmp_path / "models")
    monkeypatch.setattr(subprocess, "run", fail)
    return tmp_path / "models"


def test_a_user_is_told_and_the_test_skipped(no_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"python -m tests\.real_models"):
        real_models.real_model("smollm2")
    assert list(no_index.iterdir()) == [], "nothing half-downloaded is left"


def test_in_ci_it_is_a_failure(no_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="cannot be had"):
        real_models.real_model("gemma3")


def test_another_file_is_not_taken(no_index: Path) -> None:
    no_index.mkdir()
    (no_index / real_models.SOURCES["smollm2"].file).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"SHA-256 .* expected b179c952"):
        real_models.fetch("smollm2")
