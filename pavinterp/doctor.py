"""doctor(): what this installation is made of, what is wrong with it, and what would add what it lacks."""

from __future__ import annotations

import importlib
import os
import platform
import re
import tempfile
import urllib.error
import urllib.request
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from pavinterp import __version__, plugins
from pavinterp.cache import cache_root
from pavinterp.exits import one_line

OPTIONAL = {
    "transformer-lens": ("models in a TransformerBridge", "pavinterp[lens]"),
    "datasets": ("--corpus hf:NAME", "pavinterp[datasets]"),
    "ray": ("--engine ray", "pavinterp[ray]"),
    "peft": ("models with adapters", "peft"),
    "bitsandbytes": ("8- and 4-bit weights of bitsandbytes", "bitsandbytes"),
    "torchao": ("quantised weights of torchao", "torchao"),
    "optimum-quanto": ("quantised weights of quanto", "optimum-quanto"),
}
"""Packages that pavinterp makes use of where they are: what for, and what pip calls them."""

IMPORTED = ("torch", "transformers", "pyarrow", "matplotlib")  # whose compiled parts fail where an installation is torn
PATIENCE = 4.0  # seconds for an answer of the hub


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        part: "package", "optional", "device", "cache", "hub" or "plug-in".
        name: of what was looked at.
        status: "ok", "absent" (nothing needs it here) or "broken" (something that is needed does not work).
        detail: version, size, or what is wrong.
        advice: what to do; empty where nothing need be done.
    """

    part: str
    name: str
    status: Literal["ok", "absent", "broken"]
    detail: str
    advice: str = ""


def doctor(*, network: bool = True) -> dict[str, Any]:
    """Examine this installation.

    Args:
        network: whether to ask the Hugging Face hub for an answer.

    Returns:
        healthy (nothing that is needed is broken), pavinterp, python, platform, and findings: one dict each with part,
        name, status, detail and advice as in `Finding`.
    """
    findings = [*_packages(), *_optional(), *_devices(), _cache(), _hub(network), *_plugins()]
    return {
        "healthy": all(finding.status != "broken" for finding in findings),
        "pavinterp": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "findings": [asdict(finding) for finding in findings],
    }


def _packages() -> list[Finding]:
    """Every requirement of pavinterp, with its version, and whether it is one that pavinterp works with."""
    from packaging.requirements import Requirement

    try:
        lines = requires("pavinterp") or []
    except PackageNotFoundError:
        return [Finding("package", "pavinterp", "broken", "runs from a folder, is not installed", "pip install .")]
    found = []
    for needed in map(Requirement, lines):
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        advice = f"pip install '{needed.name}{needed.specifier}'"
        try:
            have = version(needed.name)
        except PackageNotFoundError:
            found.append(Finding("package", needed.name, "broken", "is not installed", advice))
            continue
        if not needed.specifier.contains(have, prereleases=True):
            wrong = f"{have} is not {needed.specifier}"
        else:
            wrong = _import_error(needed.name) if needed.name in IMPORTED else ""
            advice = f"pip install --force-reinstall '{needed.name}=={have}'"
        found.append(Finding("package", needed.name, "broken" if wrong else "ok", wrong or have, wrong and advice))
    return found


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a torn installation raises
        return f"cannot be imported ({type(error).__name__}: {one_line(error, 160)})"
    return ""


def _optional() -> list[Finding]:
    found = []
    for name, (use, target) in OPTIONAL.items():
        try:
            found.append(Finding("optional", name, "ok", version(name)))
        except PackageNotFoundError:
            found.append(Finding("optional", name, "absent", f"for {use}", f"pip install '{target}'"))
    return found


def _devices() -> list[Finding]:
    """The CPU with its memory, and every accelerator that torch sees."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {_size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}"
    found = [Finding("device", "cpu", "ok", f"{cores} cores{memory}")]
    try:
        import torch
    except Exception:  # told of among the packages
        return found
    try:
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            said = f"{torch.cuda.get_device_name(i)}, {_size(free)} of {_size(total)} free"
            found.append(Finding("device", f"cuda:{i}", "ok", said))
    except Exception as error:  # a driver that does not fit
        advice = "bring driver and torch together, or use --device cpu"
        found.append(Finding("device", "cuda", "broken", one_line(error, 160), advice))
    if torch.backends.mps.is_available():
        found.append(Finding("device", "mps", "ok", "shares the memory of the CPU"))
    return found


def _cache() -> Finding:
    """pavinterp's own folder: where interrupted work and dequantised models are kept."""
    folder = cache_root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = "make it writable, or name another folder in PAVINTERP_CACHE"
        return Finding("cache", str(folder), "broken", error.strerror or one_line(error), advice)
    return Finding("cache", str(folder), "ok", f"{_size(_bytes_in(folder))}, writable")


def _bytes_in(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # another process tidied it away
                continue
    return total


def _hub(network: bool) -> Finding:
    """Whether models can be fetched; none need be for the embedded one and for those that are here."""
    try:
        from huggingface_hub import constants
    except Exception as error:
        return Finding("hub", "huggingface_hub", "broken", one_line(error, 160), "pip install huggingface_hub")
    where = f"models are kept in {constants.HF_HUB_CACHE}"
    name = re.sub(r"^https?://", "", constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return Finding("hub", name, "absent", f"offline (HF_HUB_OFFLINE is set); {where}", "unset HF_HUB_OFFLINE")
    if not network:
        return Finding("hub", name, "absent", f"not asked; {where}")
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:  # an answer all the same
        pass
    except (OSError, ValueError) as error:
        advice = "check network and proxy; folders, .gguf files and models fetched before work without it"
        return Finding("hub", name, "absent", f"no answer ({one_line(error, 100)}); {where}", advice)
    return Finding("hub", name, "ok", f"answers; {where}")


def _plugins() -> list[Finding]:
    """What other packages add: loaded, so that what is left out of them is found."""
    listed = {kind: plugins.points(kind) for kind in plugins.KINDS}
    if not any(listed.values()):
        return []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            from pavinterp.capture.paths import added_families
            from pavinterp.experiments.all_rules import all_rules
            from pavinterp.measures import added_measures
            from pavinterp.paradigms import available

            for find in (added_measures, all_rules, available, added_families):
                find.cache_clear()
                find()
        except ImportError:  # of pavinterp's own: told of among the packages
            return []
    said = [str(one.message) for one in seen]
    found = []
    for kind, points in listed.items():
        for point in points:
            start = f"{point.name!r} of package {plugins.package_of(point)} is left out of the {kind}: "
            wrong = next((line.removeprefix(start) for line in said if line.startswith(start)), "")
            what, _, advice = wrong.rpartition("; ")
            detail = what or f"of {plugins.package_of(point)}"
            found.append(Finding("plug-in", f"{kind}: {point.name}", "broken" if wrong else "ok", detail, advice))
    return found


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def lines(found: dict[str, Any]) -> list[str]:
    """What `doctor` found, for a reader: a line each, what is to be done behind it."""
    rows = [row | {"name": f"{row['part']} {row['name']}"} for row in found["findings"]]
    wide = max(len(row["name"]) for row in rows)
    told = [f"pavinterp {found['pavinterp']}, Python {found['python']}, {found['platform']}"]
    for row in rows:
        advice = f": {row['advice']}" if row["advice"] else ""
        told.append(f"{row['status']:<7} {row['name']:<{wide}}  {row['detail']}{advice}")
    broken = sum(row["status"] == "broken" for row in rows)
    told.append(f"broken: {broken}, see above" if broken else "all that is needed works")
    return told
