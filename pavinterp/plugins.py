"""What other installed packages add, by entry points: finding it, loading it, and leaving out what is broken.

Groups: pavinterp.measures, pavinterp.rules, pavinterp.paradigms, pavinterp.architectures (docs/extend.md has a recipe
for each). PAVINTERP_PLUGINS=0 leaves all of them out.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from pavinterp.errors import UserError
from pavinterp.exits import one_line

KINDS = ("measures", "rules", "paradigms", "architectures")

T = TypeVar("T")


def load(kind: str, accept: Callable[[str, Any, str], T], taken: Collection[str]) -> dict[str, T]:
    """What other packages add of one kind, by name; of what is left out, one warning each says the package and why.

    Args:
        kind: one of KINDS.
        accept: takes the name, the object that the entry point names, and its package with version; returns what is
            kept, or raises for what cannot be.
        taken: names that are pavinterp's own.
    """
    found: dict[str, T] = {}
    for point in points(kind):
        package = package_of(point)
        try:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", point.name):
                raise UserError("names are of small letters, digits and _")
            if point.name in taken:
                raise UserError("pavinterp has one of that name")
            if point.name in found:
                raise UserError("another package has one of that name")
            found[point.name] = accept(point.name, point.load(), package)
        except (Exception, SystemExit) as error:  # whatever its code raises: the rest goes on without it
            why = one_line(error, 200) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
            warnings.warn(
                f"{point.name!r} of package {package} is left out of the {kind}: {why}; mend or uninstall the package",
                stacklevel=1,
            )
    return found


def points(kind: str) -> list[EntryPoint]:
    """The entry points of one kind, none of them loaded, in the order of their names."""
    if os.environ.get("PAVINTERP_PLUGINS") == "0":
        return []
    return sorted(entry_points(group=f"pavinterp.{kind}"), key=lambda point: (point.name, package_of(point)))


def package_of(point: EntryPoint) -> str:
    """Name and version of the package that an entry point came with."""
    return "of unknown name" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def versions() -> dict[str, str]:
    """Versions of all packages that add something, whether or not it was used: a run is told apart by them."""
    dists = {point.dist.name: point.dist.version for kind in KINDS for point in points(kind) if point.dist is not None}
    return dict(sorted(dists.items()))
