"""What every error message of ours must be: one line, and not a long one."""

from __future__ import annotations

import pytest


def one_line(error: pytest.ExceptionInfo) -> str:
    """The message, checked."""
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 400
    return message
