"""Checks of what a caller passes in Python, where no command line has looked at it first."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from pavinterp.errors import UserError


def require_whole(name: str, value: Any, at_least: int, instead: str = "") -> None:
    """UserError unless `value` is a whole number of at least `at_least`; `instead` names what else there is."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least:
        return
    raise UserError(f"{name} must be a whole number of at least {at_least}{instead}, got {value!r:.40}")


def require_one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """UserError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r:.40}")
