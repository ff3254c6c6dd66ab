"""How commands end: the line, the exit code, and a traceback only where asked for."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch

from pavinterp.errors import UserError
from pavinterp.exits import Terminated, end, ending, one_line

CPU_ALLOCATION = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (UserError("corpus notes.txt is empty"), "corpus notes.txt is empty", 2),
        (KeyboardInterrupt(), "interrupted", 130),
        (Terminated(), "terminated", 143),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), "--batch", 2),
        (RuntimeError(CPU_ALLOCATION), "--batch", 2),
        (RuntimeError("MPS backend out of memory (MPS allocated: 17.0 GB)"), "--dtype", 2),
        (MemoryError(), "--context", 2),
        (OSError(errno.ENOSPC, "No space left on device", "/home/me/.cache/x"), "disk full while writing /home/me", 2),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk full", 2),
        (ValueError("bad\nshape"), "internal error: ValueError: bad shape; run with PAVINTERP_DEBUG=1", 1),
        (AssertionError(), "internal error: AssertionError; run with PAVINTERP_DEBUG=1", 1),
        (RuntimeError("expected shape (3, 4)"), "internal error", 1),
    ],
)
def test_each_error_has_its_line_and_code(error: BaseException, words: str, code: int) -> None:
    line, found = ending(error)
    assert words in line
    assert "\n" not in line
    assert found == code


def test_a_real_allocation_that_cannot_be_met_is_out_of_memory() -> None:
    for allocate in (lambda: torch.empty(1 << 60, dtype=torch.int8), lambda: np.empty(1 << 60, dtype=np.int8)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            allocate()
        assert ending(raised.value)[1] == 2


def test_a_traceback_only_where_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAVINTERP_DEBUG", raising=False)
    assert end(ValueError("boom")) == 1
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("PAVINTERP_DEBUG", "1")
    assert end(ValueError("boom")) == 1
    assert "Traceback" not in capsys.readouterr().out
    try:
        raise ValueError("boom")
    except ValueError as error:
        end(error)
    assert "Traceback" in capsys.readouterr().err


def test_a_message_of_many_lines_with_control_characters_is_one_clean_line() -> None:
    text = one_line(ValueError("first\r\n\x1b[31msecond\x00\tthird" + os.linesep))
    assert text == "first [31msecond third"
    assert len(one_line(ValueError("x" * 10_000))) == 500
