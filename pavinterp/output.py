"""Folders that appear whole or not at all: written beside their place, then renamed into it.

What a killed process left half way is put right by the next one that writes there.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from pavinterp.errors import UserError

# What a run folder may hold; anything else there is somebody's own.
FILES = {
    *("manifest.json", "heads.csv", "heads.parquet", "records.parquet", "tests.parquet", "spectra.parquet"),
    *("examples.json", "index.html", ".DS_Store", "Thumbs.db", "desktop.ini"),
}
FOLDERS = {"heads": (".html",), "figures": (".svg",), "experiments": (".parquet", ".csv", ".json")}

FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def new_folder(path: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Write a folder beside `path` and rename it there when all of it is written.

    An exception or Ctrl-C inside the block removes what was written and leaves `path` as it was. An earlier
    run is removed only once the new one stands in its place.

    Args:
        path: the folder to make. Its parent is made too where only that is missing.
        overwrite: replace `path` where it is an earlier pavinterp run, and only then.

    Yields:
        the empty folder to write into, named `.NAME.partial-PID`, on the same file system as `path`.

    Raises:
        UserError: see `check_folder`; also where the disk is full while writing.
    """
    target = check_folder(path, overwrite)
    parent = target.parent
    made_parent = not parent.exists()
    try:
        parent.mkdir(exist_ok=True)
        with ExitStack() as at_work:
            with _lock(parent):  # so that nobody finds it before it is locked, and tidies it away
                partial = _sibling(target, "partial")
                at_work.enter_context(_lock(partial, wait=False))
            try:
                yield partial
                _put(partial, target, overwrite)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except BaseException as error:
        if made_parent:
            with suppress(OSError):  # not empty: somebody else uses it by now
                parent.rmdir()
        if isinstance(error, OSError) and error.errno in FULL:
            raise UserError(f"disk full while writing {target}: free some space or choose another folder") from error
        raise


def check_folder(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Whether `new_folder` could write there, found out by trying; leaves nothing behind.

    To be called before hours of work whose result goes there.

    Returns:
        the absolute path, symbolic links followed.

    Raises:
        UserError: `path` exists (and is no pavinterp run, or `overwrite` is False), its parent's parent does
            not exist, or nothing can be written there.
    """
    if not os.fspath(path):
        raise UserError("the output folder has an empty name: give a path such as reports/gpt2")
    target = Path(os.path.expanduser(path))  # ~nobody stays as it is
    try:
        target = target.resolve()
        if target.parent.is_dir():
            with _lock(target.parent):  # not while another process puts its run there
                _tidy(target)
                if os.path.lexists(target):
                    _check_replaceable(target, overwrite)
        holder = target.parent if target.parent.exists() else target.parent.parent
        if not holder.is_dir():
            wrong = "is not a folder" if holder.exists() else "does not exist"
            raise UserError(f"cannot write {path}: {holder} {wrong}: make it first or choose another folder")
        _sibling(holder / target.name, "probe").rmdir()
    except OSError as error:
        reason = "no permission to write there" if error.errno in FORBIDDEN else error.strerror or str(error)
        advice = "free some space or choose another folder" if error.errno in FULL else "choose another folder"
        raise UserError(f"cannot write {path}: {reason}: {advice}") from error
    return target


def check_file(path: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Whether `write_file` could write there, before the work whose result goes there.

    Raises:
        UserError: `path` exists (and `overwrite` is False, or it is no file), or its folder takes no file.
    """
    target = Path(os.path.expanduser(path))
    if target.is_dir():
        raise UserError(f"cannot write {path}: it is a folder: give the name of a file")
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"{path} exists: replace it with --overwrite or choose another name")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: {target.parent} is not a folder: make it first or choose another place")
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"cannot write {path}: no permission to write there: choose another folder")
    return target


def write_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all: beside its place, then renamed into it."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _check_replaceable(target: Path, overwrite: bool) -> None:
    """Refuse what stands at `target` unless it is a pavinterp run that may be replaced."""
    if not target.is_dir():
        raise UserError(f"{target} exists and is not a folder: choose another name")
    if not is_run(target):
        raise UserError(f"{target} exists and is not a pavinterp run, so it is never replaced: choose another name")
    if not overwrite:
        made = _manifest(target).get("command")
        how = f" (made by `{made:.150}`)" if isinstance(made, str) else ""
        raise UserError(f"{target} exists{how}: replace it with --overwrite (overwrite=True) or choose another name")
    if target in (here := Path.cwd(), *here.parents):
        raise UserError(
            f"{target} is the folder you are in and cannot be replaced: go elsewhere, or choose another name"
        )
    if foreign := _foreign(target):
        raise UserError(
            f"{target} holds {foreign}, which pavinterp did not write and would delete: move it, or choose another name"
        )


def is_run(folder: Path) -> bool:
    """Whether a folder was written by pavinterp: its manifest.json names the version that did."""
    return "pavinterp_version" in _manifest(folder)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _foreign(run: Path) -> str | None:
    """Something in a run folder that is no part of a run, by its path there."""
    for path in sorted(run.iterdir()):
        if path.name in FOLDERS and path.is_dir():
            for inside in path.iterdir():
                if not inside.name.endswith(FOLDERS[path.name]):
                    return f"{path.name}/{inside.name}"
        elif path.name not in FILES:
            return path.name
    return None


def _sibling(target: Path, role: str) -> Path:
    """A new empty folder beside `target`, with the permissions the user's umask gives."""
    for attempt in range(1000):  # another machine on a shared disk may have the same process number
        folder = target.parent / f".{target.name}.{role}-{os.getpid()}{f'-{attempt}' if attempt else ''}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(errno.EEXIST, "too many unfinished folders", str(folder))


def _put(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename `partial` to `target`; what stands there goes only after that. Other processes wait meanwhile."""
    with _lock(target.parent):
        if not os.path.lexists(target):
            partial.rename(target)
            return
        _check_replaceable(target, overwrite)  # again: it may have appeared or changed while we worked
        old = _sibling(target, "old")
        old.rmdir()  # the name was wanted; not every system renames onto an empty folder
        target.rename(old)
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
    shutil.rmtree(old, ignore_errors=True)


def _tidy(target: Path) -> None:
    """Put right what killed processes left beside `target`, and nothing else; its parent is locked meanwhile."""
    for path in sorted(target.parent.glob(f".{glob.escape(target.name)}.*")):
        ours = re.fullmatch(r"(old|partial)-\d+(-\d+)?", path.name.removeprefix(f".{target.name}."))
        if ours is None or path.is_symlink():
            continue
        try:
            if not path.is_dir() or _foreign(path):
                continue
        except FileNotFoundError:  # whoever owns it is deleting it just now, which needs no lock
            continue
        if ours[1] == "partial":
            with suppress(OSError), _lock(path, wait=False) as locked:
                if locked:  # whoever made it is gone
                    shutil.rmtree(path, ignore_errors=True)
        elif is_run(path):
            if os.path.lexists(target):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(target)  # killed between the two renames of `_put`


@contextmanager
def _lock(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a folder itself, which leaves no file behind and ends with the process.

    Yields:
        whether it is held: False where another process holds it (and `wait` is False), or the system has none.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        held = False
        with suppress(OSError):  # held by another, or a network file system that cannot
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        yield held
    finally:
        os.close(descriptor)
