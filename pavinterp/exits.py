"""How a command ends when it does not end well: the one line it prints and its exit code.

0 done, 1 our fault, 2 the user's to change, 130 interrupted, 143 terminated. A traceback only where PAVINTERP_DEBUG=1
asks for it.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import suppress

from pavinterp.errors import UserError
from pavinterp.output import FULL

# what torch says, in a plain RuntimeError, where an allocation fails outside its CUDA allocator
_ALLOCATION = re.compile(r"can't allocate memory|not enough memory|out of memory|failed to allocate", re.IGNORECASE)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which a batch scheduler sends before it kills: to be treated as Ctrl-C is."""


def ending(error: BaseException) -> tuple[str, int]:
    """The line that says what went wrong and what to do, and the exit code."""
    if isinstance(error, UserError):
        return one_line(error), 2
    if isinstance(error, KeyboardInterrupt):
        what, code = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        return f"{what}: " + "; ".join(getattr(error, "__notes__", ["nothing was written"])), code
    if is_out_of_memory(error):
        return "out of memory: try a smaller --batch, then a shorter --context or --dtype bfloat16", 2
    if isinstance(error, OSError) and error.errno in FULL:
        where = f" while writing {error.filename}" if error.filename else ""
        return f"disk full{where}: free some space or choose another place", 2
    what = f"{type(error).__name__}: {one_line(error)}" if str(error).strip() else type(error).__name__
    return f"internal error: {what}; run with PAVINTERP_DEBUG=1 for the traceback", 1


def end(error: BaseException) -> int:
    """Print how a command ended on standard error; return its exit code."""
    if isinstance(error, BrokenPipeError):  # `pavinterp heads RUN | head`: the reader has what it wanted
        discard_output()
        return 0
    line, code = ending(error)
    if os.environ.get("PAVINTERP_DEBUG") == "1" and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    print(f"pavinterp: {line}", file=sys.stderr)
    return code


def discard_output() -> None:
    """Point standard output at nothing, so that Python does not complain at exit about what it could not flush."""
    with suppress(OSError, ValueError):  # a stream without a descriptor has nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or a device (torch is not imported to find out)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _ALLOCATION.search(str(error)) is not None


def one_line(error: BaseException, longest: int = 500) -> str:
    """The message of an exception with line breaks folded and control characters taken out."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"
