"""What all tests share: limits that are set before torch starts, and the embedded model, loaded and measured once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

# Set before torch, tokenizers or matplotlib are imported: tests run side by side, each on one core, and reach no hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

if TYPE_CHECKING:
    from pavinterp.models import ModelHandle
    from pavinterp.run import Run

hypothesis.settings.register_profile("pavinterp", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("pavinterp")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """torch takes OMP_NUM_THREADS only where nothing else chose before; say it again."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def nothing_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each test, and each command that it starts, with a cache of its own: one that stops leaves parts to none."""
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def demo() -> ModelHandle:
    """The embedded model. Shared by all tests of a process: leave it as it is."""
    import pavinterp

    return pavinterp.load("demo")


@pytest.fixture(scope="session")
def demo_run(demo: ModelHandle) -> Run:
    """A small run: every head of the embedded model on 16 sequences of 128 tokens, one from each document."""
    import pavinterp

    return pavinterp.measure(demo, "demo", context=128, sequences=16, tests=24)


@pytest.fixture(scope="session")
def demo_folder(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on disk, without pages. Shared: read only."""
    return demo_run.save(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs inside its temporary folder, where relative paths such as reports/ lead."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
