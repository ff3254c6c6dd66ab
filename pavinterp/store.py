"""The run folder: records, heads and details as files, and the manifest that says how they came about."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from pavinterp.errors import UserError
from pavinterp.experiment import Experiment


@dataclass
class Details:
    """What the head pages show beside the heads table.

    Attributes:
        tests: one row per sampled test of the first sequences x layer x head; positions count from 0.
        spectra: mean eigenvalue spectrum of the centred unit CSs: layer, kv_head, rank, eigenvalue.
        examples: strongest associations, decoded (see pavinterp.examples).
    """

    tests: pd.DataFrame = field(default_factory=pd.DataFrame)
    spectra: pd.DataFrame = field(default_factory=pd.DataFrame)
    examples: list[dict[str, Any]] = field(default_factory=list)


def write(
    folder: Path,
    records: pd.DataFrame,
    heads: pd.DataFrame,
    details: Details,
    manifest: dict[str, Any],
    experiments: dict[str, Experiment],
) -> None:
    """Write every file of a run into an existing folder; the manifest last, so that a folder with one is whole."""
    records.to_parquet(folder / "records.parquet", index=False)
    flat = heads.reset_index()
    flat.attrs = {}
    flat.to_parquet(folder / "heads.parquet", index=False)
    flat.to_csv(folder / "heads.csv", index=False, float_format="%.6g")
    details.tests.to_parquet(folder / "tests.parquet", index=False, compression="zstd")
    details.spectra.to_parquet(folder / "spectra.parquet", index=False)
    _write_json(folder / "examples.json", details.examples, indent=None)
    if experiments:
        (folder / "experiments").mkdir()
    for experiment in experiments.values():
        _write_experiment(folder / "experiments", experiment)
    _write_json(folder / "manifest.json", manifest, indent=2)


def _write_experiment(folder: Path, experiment: Experiment) -> None:
    for name, frame in {"numbers": experiment.numbers, **experiment.frames}.items():
        plain = frame.copy()
        plain.attrs = {}
        plain.reset_index().to_parquet(folder / f"{experiment.name}.{name}.parquet", index=False)
        plain.to_csv(folder / f"{experiment.name}.{name}.csv", float_format="%.6g")
    index = {name: list(frame.index.names) for name, frame in experiment.frames.items()}
    attrs = {name: experiment.numbers.attrs.get(name, {}) for name in ("units", "descriptions")}
    _write_json(folder / f"{experiment.name}.json", {**experiment.manifest, **attrs, "index": index}, indent=2)


def _read_experiment(path: Path) -> Experiment:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    index = manifest.pop("index")

    def frame(name: str, keys: list[str]) -> pd.DataFrame:
        return pd.read_parquet(path.with_name(f"{path.stem}.{name}.parquet")).set_index(keys)

    numbers = frame("numbers", ["layer", "head"])
    numbers.attrs = {name: manifest.pop(name) for name in ("units", "descriptions")}
    return Experiment(path.stem, numbers, {name: frame(name, keys) for name, keys in index.items()}, manifest)


def _write_json(path: Path, value: Any, indent: int | None) -> None:
    """UTF-8; half of a surrogate pair, which a token may be, becomes the escape that JSON has for it."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=_plain)
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def read(folder: Path) -> tuple[pd.DataFrame, Details, dict[str, Any], dict[str, Experiment]]:
    """Records, details, manifest and experiments of a run folder.

    Raises:
        UserError: the folder is not a run, or its records were left out.
    """
    manifest = read_manifest(folder)
    name = "records.parquet"
    try:
        records = pd.read_parquet(folder / name)
        _check_records(records, manifest)
        details = Details()
        for name in ("tests.parquet", "spectra.parquet"):
            if (folder / name).exists():
                setattr(details, name.removesuffix(".parquet"), pd.read_parquet(folder / name))
        name = "examples.json"
        if (folder / name).exists():
            details.examples = json.loads((folder / name).read_text(encoding="utf-8"))
        name = "experiments"
        found = [_read_experiment(path) for path in sorted((folder / name).glob("*.json"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: {name} cannot be read ({_first_line(error)}); measure again") from error
    return records, details, manifest, {experiment.name: experiment for experiment in found}


def _check_records(records: pd.DataFrame, manifest: dict[str, Any]) -> None:
    """ValueError where records are not one row per sequence x layer x head of what the manifest names."""
    names = ["stimuli", "sequence", "document", "layer", "head"]
    if missing := [name for name in names if name not in records.columns]:
        raise ValueError(f"no column {missing[0]}")
    heads = sum(layer["heads"] for layer in manifest["layers"])
    expected = heads * (manifest["corpus"]["sequences"] + manifest["probe"]["sequences"])
    if len(records) != expected or records.duplicated(["stimuli", "sequence", "layer", "head"]).any():
        raise ValueError(f"{len(records):,} rows, not one for each of {expected:,} sequences x heads")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run folder.

    Raises:
        UserError: there is none, or it is not one of ours.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["pavinterp_version"], manifest["model"], manifest["layers"], manifest["seed"]
    except FileNotFoundError:
        raise UserError(f"{folder}: not a run folder (no manifest.json); make one with `pavinterp report`") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{folder}/manifest.json cannot be read ({_first_line(error)}); measure again") from error
    return manifest


def read_heads(folder: Path) -> pd.DataFrame:
    """The heads table of a run folder, indexed by (layer, head); needs no records.

    Raises:
        UserError: as for `read_manifest`, or heads.parquet is missing or damaged.
    """
    read_manifest(folder)
    try:
        return pd.read_parquet(folder / "heads.parquet").set_index(["layer", "head"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}/heads.parquet cannot be read ({_first_line(error)}); measure again") from error


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return str(value)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
