"""The user's cache: where it is, and locks in it that keep two processes from the same work."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pavinterp.errors import UserError


def cache_root() -> Path:
    """Folder for what is kept between runs: `$PAVINTERP_CACHE`, else the user's cache folder on this platform."""
    from platformdirs import user_cache_path

    chosen = os.environ.get("PAVINTERP_CACHE")
    return Path(chosen).expanduser() if chosen else user_cache_path("pavinterp", appauthor=False)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Inside, no other process of this user writes the same folder: hours of work that could not be put there.

    The lock is a file in the user's cache that the system gives back when its process ends, however it ends.

    Raises:
        UserError: another process is at it.
    """
    from filelock import FileLock, Timeout

    name = hashlib.sha256(os.fsencode(path.expanduser().resolve())).hexdigest()[:32]
    lock = FileLock(cache_root() / "locks" / f"{name}.lock", timeout=0)
    with suppress(OSError):
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"{path} is being written by another process: wait for it, or choose another folder") from None
    except (OSError, NotImplementedError):  # no cache, or a file system without locks
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(lock.lock_file)  # while it is held: nobody else can be in between
        lock.release()
