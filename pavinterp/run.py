"""Run: what a measurement gave, from its records to its table of heads and its folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from pavinterp import store
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment, with_numbers
from pavinterp.output import new_folder
from pavinterp.sweep import LayerInfo
from pavinterp.tables import heads_table


@dataclass(repr=False)
class Run:
    """What a measurement gave.

    Attributes:
        records: one row per sequence x layer x head; columns as `pavinterp.describe()` says.
        layers: shape of each measured layer.
        details: what head pages show beside the heads table.
        manifest: how the run came about; enough to make it again.
        experiments: by name, those that were added to it.
    """

    records: pd.DataFrame
    layers: list[LayerInfo]
    details: store.Details
    manifest: dict[str, Any]
    experiments: dict[str, Experiment] = field(default_factory=dict)

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"Run({model['name']}: {model['heads']} heads in {model['layers']} layers, {text['sequences']} sequences "
            f"of {text['context']} tokens; .heads(), .report(path), .records, .details, .manifest)"
        )

    def heads(self) -> pd.DataFrame:
        """One row per layer x head with 95 % intervals (see `pavinterp.tables.heads_table`); experiments' beside."""
        return with_numbers(heads_table(self.records, self.layers, self.manifest["seed"]), self.experiments)

    def add(self, found: Any) -> Run:
        """Put what an experiment found beside the run: in its heads table, its folder and its pages. Returns the run.

        Args:
            found: what `pavinterp.explain`, `memory_capacity`, `needed_associations`, `linearisation_cost`,
                `association_budget` or `error_propagation` returned for the same model.

        Raises:
            UserError: it was found on another model.
        """
        experiment: Experiment = found.experiment()
        mine, other = self.manifest["model"], experiment.manifest["model"]
        if (mine["revision"], mine["dtype"]) != (other["revision"], other["dtype"]):
            raise UserError(
                f"{experiment.name} was found on {other['name']} ({other['revision']:.24}, {other['dtype']}), the run "
                f"is of {mine['name']} ({mine['revision']:.24}, {mine['dtype']}): add what is of one model"
            )
        self.experiments[experiment.name] = experiment
        return self

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write records, tables and manifest, without pages, to a new folder; whole or not at all.

        Raises:
            UserError: the folder exists (and `overwrite` is False, or it is not a run), or cannot be written.
        """
        with new_folder(Path(path), overwrite) as folder:
            store.write(folder, self.records, self.heads(), self.details, self.manifest, self.experiments)
        return Path(path)

    def report(self, path: str | Path, *, overwrite: bool = False, pages: Collection[int] | None = None) -> Path:
        """Write everything `save` writes and the pages; return the path of index.html.

        `pages` are the layers whose heads get a page of their own; None is all.

        Raises:
            UserError: as for `save`.
        """
        from pavinterp.report import write as write_pages

        unknown = set(pages or ()) - {info.layer for info in self.layers}
        if unknown:
            raise UserError(f"pages for layers {sorted(unknown)}: those layers were not measured; choose among them")
        with new_folder(Path(path), overwrite) as folder:
            store.write(folder, self.records, self.heads(), self.details, self.manifest, self.experiments)
            write_pages(self, folder, pages)
        return Path(path) / "index.html"

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a run folder back.

        Raises:
            UserError: not a run folder, or its records were left out.
        """
        records, details, manifest, experiments = store.read(Path(path))
        try:
            layers = [LayerInfo(**row) for row in manifest["layers"]]
        except TypeError as error:
            raise UserError(f"{path}/manifest.json cannot be read (layers: {error}); measure again") from error
        return cls(records, layers, details, manifest, experiments)
