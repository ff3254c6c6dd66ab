"""The user's cache: its place, and the locks in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pavinterp.cache import alone, cache_root
from pavinterp.errors import UserError

ALONE = """
import sys, time, pathlib, pavinterp.cache as cache
with cache.alone(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAVINTERP_CACHE")
    assert cache_root().name == "pavinterp"
    assert cache_root().is_absolute()


def test_the_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it goes: the first one is killed, and its lock ends with it."""
    target = tmp_path / "run"
    other = subprocess.Popen([sys.executable, "-c", ALONE, str(target)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match="run is being written by another process: wait"), alone(Path("run")):
            pass
        with alone(tmp_path / "another"):
            pass
    finally:
        other.kill()
        other.communicate()
    with alone(target):
        pass
    assert os.listdir(cache_root() / "locks") == []


def test_without_a_cache_there_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAVINTERP_CACHE", str(tmp_path / "file"))
    with alone(tmp_path / "run"):
        pass
