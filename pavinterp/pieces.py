"""Pieces of long work, kept in the user's cache as they are finished: interrupted work goes on where it stopped."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pandas as pd

from pavinterp.cache import cache_root
from pavinterp.errors import UserError
from pavinterp.exits import one_line
from pavinterp.output import write_file

DIGEST = hashlib.sha256().digest_size
FORGOTTEN = 30 * 24 * 3600  # seconds after which parts in the cache that nobody has come back for are removed


class Pieces:
    """Frames by name: computed once, read where they are there already.

    Attributes:
        folder: where they are kept; None keeps nothing, and every frame is computed.
        work: digest of the work that they are of; None where that was not asked for.
        found: how many were read.
    """

    def __init__(self, folder: Path | None = None, work: str | None = None) -> None:
        self.folder, self.work, self.found = folder, work, 0

    def frame(self, name: str, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
        """The frame of this name, read or made; its index, dtypes and `attrs` are those that `make` gave.

        One that is damaged is named, set aside and made again; where there is no room to keep one, a warning says so
        once, and the work goes on without.
        """
        frame = self.read(name)
        return self.keep(name, make()) if frame is None else frame

    def read(self, name: str) -> pd.DataFrame | None:
        """The frame of this name, or None where it is not there (whole)."""
        path = None if self.folder is None else self.folder / f"{name}.part"
        if path is None or not path.is_file():
            return None
        try:
            content = path.read_bytes()
            digest, table = content[:DIGEST], content[DIGEST:]
            if hashlib.sha256(table).digest() != digest:  # parquet itself notices half of the bits that flip
                raise ValueError("another checksum")
            frame = pd.read_parquet(io.BytesIO(table))
        except (OSError, ValueError) as error:  # cut short, damaged, or of another version
            aside = path.with_name(f"{path.name}.damaged")
            with suppress(OSError):
                path.replace(aside)
            warnings.warn(
                f"{path} is damaged ({one_line(error, 120)}): set aside as {aside.name} and measured again",
                stacklevel=1,
            )
            return None
        self.found += 1
        return frame

    def keep(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame, which `read` gives from now on."""
        if self.folder is None:
            return frame
        path = self.folder / f"{name}.part"
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # another process may have done the same work and left
            table = frame.to_parquet()
            partial.write_bytes(hashlib.sha256(table).digest() + table)
            partial.replace(path)  # whole, or not there
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self.folder = None
            warnings.warn(
                f"finished parts are not kept any more ({one_line(error, 120)}): if interrupted, all begins anew",
                stacklevel=1,
            )
        return frame


@contextmanager
def kept_pieces(of: dict[str, Any] | None, parts: Path | None = None, *, stay: bool = False) -> Iterator[Pieces]:
    """Pieces of one piece of work, removed when it is done; they stay where it is broken off.

    Args:
        of: all that the frames depend on, for `json`: only work that is the same in all of it takes up the pieces. None
            keeps and reads nothing.
        parts: the folder to keep them in, which holds those of no other work; None is in the user's cache.
        stay: whether they stay when this process has done its share.

    Raises:
        UserError: `parts` cannot be written, or holds parts of other work.
    """
    if of is None:
        yield Pieces()
        return
    work = digest(of)
    folder = (cache_root() / "unfinished" if parts is None else parts) / work
    if parts is not None:
        _require_no_others(parts, folder, of)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "of.json", _text(of))
    except OSError as error:
        if parts is not None:
            raise UserError(f"finished parts cannot be kept in {parts}: {one_line(error, 120)}") from error
        warnings.warn(f"finished parts are not kept ({one_line(error, 120)}): set PAVINTERP_CACHE", stacklevel=1)
        yield Pieces(work=work)
        return
    if parts is None:
        _forget(folder.parent)
    if parts is None and any(folder.glob("*.part")):
        warnings.warn(
            "goes on where the same work was interrupted (--no-resume, or resume=False, begins anew)", stacklevel=1
        )
    try:
        yield Pieces(folder, work)
    except KeyboardInterrupt as error:
        if finished := len(list(folder.glob("*.part"))):
            error.add_note(f"{finished} finished parts are kept, the same command goes on from there")
        raise
    if stay:
        return
    waiting = _waiting.get()
    if waiting is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        waiting.append(folder)


def digest(of: dict[str, Any]) -> str:
    """What names a piece of work."""
    return hashlib.sha256(_text(of).encode()).hexdigest()[:32]


def _text(of: dict[str, Any]) -> str:
    return json.dumps(of, indent=2, sort_keys=True)


def _require_no_others(parts: Path, folder: Path, of: dict[str, Any]) -> None:
    """UserError where `parts` holds those of other work: shards of which one was given another argument."""
    for path in parts.glob("*/of.json"):
        if path.parent == folder:
            continue
        try:
            said = differences(json.loads(path.read_text(encoding="utf-8")), of)
        except OSError:  # removed by the process that finished it
            continue
        except (ValueError, AttributeError):
            said = f"{path} cannot be read"
        raise UserError(
            f"{parts} holds parts of other work ({said}): give the same arguments or another folder, or remove that one"
        )


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """In words, the first three things in which two descriptions of work (plain values) differ; or nothing."""
    there, here = _leaves(there), _leaves(json.loads(json.dumps(here)))
    differ = [name for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)]
    said = [f"{name} {there.get(name)!s:.40} there, {here.get(name)!s:.40} here" for name in differ]
    return "; ".join(said[:3]) + ("; ..." if len(said) > 3 else "")


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"arguments": {"seed": 0}}` is `{"arguments.seed": 0}`."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


_waiting: ContextVar[list[Path] | None] = ContextVar("pavinterp_waiting", default=None)


@contextmanager
def until_all_is_done() -> Iterator[None]:
    """Inside, pieces of finished work stay until the block ends: what comes after it may be interrupted too."""
    token = _waiting.set([])
    try:
        yield
        for folder in _waiting.get() or ():
            shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt as error:
        if _waiting.get() and not hasattr(error, "__notes__"):
            error.add_note("what was measured is kept, the same command goes on from there")
        raise
    finally:
        _waiting.reset(token)


def _forget(unfinished: Path) -> None:
    """Remove what was interrupted long ago."""
    for folder in unfinished.iterdir():
        with suppress(OSError):  # another process may be doing the same
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > FORGOTTEN:
                shutil.rmtree(folder, ignore_errors=True)
