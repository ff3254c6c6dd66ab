"""Paradigms that come with pavinterp, one .toml file each; those that other packages add; reading the user's own.

The notation is explained in `pavinterp/theory/schedules.py`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pavinterp import plugins
from pavinterp.errors import UserError
from pavinterp.theory.schedules import Paradigm, parse


@cache
def builtin() -> dict[str, Paradigm]:
    """Every paradigm that comes with pavinterp, by name, in the order in which they are shown."""
    files = [file for file in resources.files(__name__).iterdir() if file.name.endswith(".toml")]
    found = {file.name.removesuffix(".toml"): _parsed(file.read_text("utf-8"), file.name) for file in files}
    return {name: found[name] for name in (*ORDER, *sorted(set(found) - set(ORDER)))}


@cache
def available() -> dict[str, Paradigm]:
    """Every paradigm by name: `builtin`, then those of the entry-point group `pavinterp.paradigms`."""
    return builtin() | plugins.load("paradigms", _accepted, builtin())


def _accepted(name: str, value: Any, package: str) -> Paradigm:
    """The paradigm that an entry point names: a .toml file, a Paradigm, or a function that returns one of them."""
    value = value() if callable(value) else value
    if isinstance(value, str):
        value = Path(value)
    if isinstance(value, Traversable):  # a Path is one
        value = _parsed(value.read_text("utf-8"), value.name)
    if not isinstance(value, Paradigm):
        raise UserError("name a .toml file, or a function that returns a Paradigm")
    if value.name != name:
        raise UserError(f"its name is {value.name!r:.40}, its entry point's {name!r}: make them alike")
    return value


def load(spec: str | Path) -> Paradigm:
    """A paradigm by its name, or from a .toml file. UserError where there is none, or the file holds none."""
    if isinstance(spec, str) and spec in available():
        return available()[spec]
    path = Path(spec)
    if path.suffix != ".toml":
        raise UserError(f"no paradigm {str(spec)!r:.60}: name one of {', '.join(available())}, or a .toml file")
    try:
        return _parsed(path.read_text("utf-8"), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}: name a .toml file with a paradigm") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: save it as UTF-8") from error


def _parsed(text: str, where: str) -> Paradigm:
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f'{where}: not TOML ({" ".join(str(error).split())}): write lines such as test = "B"'
        ) from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


ORDER = (
    "acquisition", "extinction", "reversal", "savings", "spontaneous_recovery", "latent_inhibition", "overshadowing",
    "blocking", "unblocking", "overexpectation", "conditioned_inhibition", "retardation", "superconditioning",
    "second_order", "sensory_preconditioning", "generalisation", "discrimination", "partial_reinforcement",
    "partial_reinforcement_extinction", "contingency", "capacity",
)  # fmt: skip
"""From one CS to many: the order of tables and pages."""
