"""Checks of what a caller passes in Python, where no command line has looked at it first."""

from __future__ import annotations

from collections.abc import Iterable
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


def require_yes_or_no(name: str, value: Any) -> None:
    """UserError unless `value` is True or False: the string "no" would count as true."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be True or False, got {value!r:.40}")


def whole_numbers(name: str, value: Any, at_least: int) -> list[int] | None:
    """A list of whole numbers from any iterable of them (a generator, an array), None where None is given.

    Raises:
        UserError: it is something else, or one of them is less than `at_least`.
    """
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UserError(f"{name} must be a list of numbers or None (all), got {value!r:.40}")
    numbers = list(value)
    for number in numbers:
        require_whole(f"each of {name}", number, at_least)
    return [int(number) for number in numbers]
