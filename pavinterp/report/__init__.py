"""Reports: a folder of pages that opens from disk and can be sent as it is; sees tables and pictures only."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pandas as pd


class Details(Protocol):
    """Frames behind the head pages, as `pavinterp.store.Details` describes them."""

    tests: pd.DataFrame
    spectra: pd.DataFrame
    examples: list[dict[str, Any]]


class Measured(Protocol):
    """What a report is made of: a `pavinterp.run.Run`, or anything with its frames."""

    @property
    def details(self) -> Any: ...

    @property
    def manifest(self) -> dict[str, Any]: ...

    @property
    def experiments(self) -> Any: ...

    def heads(self) -> pd.DataFrame: ...


def write(run: Measured, folder: str | Path, pages: Collection[int] | None = None) -> Path:
    """Write index.html, heads/*.html and figures/*.svg into an existing folder.

    Pages hold everything they need: style, script and pictures are inlined, and a policy in each forbids to load
    anything else. The index links to the data files that lie in the folder when this is called.

    Args:
        run: heads, details and manifest of a measurement.
        folder: where the pages go; beside the files that `run.save` writes.
        pages: layers whose heads get a page of their own; None is all. The index shows every head in any case.

    Returns:
        Path of index.html.
    """
    from pavinterp.experiment import frames_of
    from pavinterp.plots.words import head_name
    from pavinterp.report.head_page import OF_EXPERIMENTS, head_page
    from pavinterp.report.index_page import write_index

    folder = Path(folder)
    heads, details = run.heads(), run.details
    frames = {
        name: {key: rows.droplevel(["layer", "head"]) for key, rows in frame.groupby(level=["layer", "head"])}
        for name, frame in frames_of(run.experiments).items()
        if name in OF_EXPERIMENTS
    }
    attrs = {str(name): value for name, value in heads.attrs.items()}
    (folder / "heads").mkdir(exist_ok=True)
    names = [head_name(int(layer), int(head)) for layer, head in heads.index]
    tests = _groups(details.tests, ["layer", "head"])
    spectra = _groups(details.spectra, ["layer", "kv_head"])
    examples: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for example in details.examples:
        examples.setdefault((example["layer"], example["head"]), []).append(example)
    layers = heads.index.get_level_values("layer")
    keys = [(int(layer), int(kv)) for layer, kv in zip(layers, heads["kv_head"], strict=True)]
    siblings: dict[tuple[int, int], list[str]] = {}
    for key, name in zip(keys, names, strict=True):
        siblings.setdefault(key, []).append(name)
    paged = [i for i, layer in enumerate(layers) if pages is None or layer in pages]
    for step, i in enumerate(paged):
        name, key = names[i], keys[i]
        place = (int(heads.index[i][0]), int(heads.index[i][1]))
        page = head_page(
            heads.iloc[i],
            tests=tests.get(place, details.tests.iloc[:0]),
            spectrum=spectra.get(key, details.spectra.iloc[:0]),
            examples=examples.get(place, []),
            experiments={name: of[place] for name, of in frames.items() if place in of},
            siblings=siblings[key],
            before=names[paged[step - 1]] if step else None,
            after=names[paged[step + 1]] if step + 1 < len(paged) else None,
            of=len(names),
            attrs=attrs,
            manifest=run.manifest,
        )
        (folder / "heads" / f"{name}.html").write_text(page, encoding="utf-8")
    return write_index(folder, heads, run.manifest, frozenset(names[i] for i in paged), run.experiments)


def _groups(frame: pd.DataFrame, by: list[str]) -> dict[tuple[int, int], pd.DataFrame]:
    """The rows of each head (or KV head), found in one pass."""
    if frame.empty:
        return {}
    found = {}
    for _, rows in frame.groupby(by, sort=False):
        found[int(rows[by[0]].iloc[0]), int(rows[by[1]].iloc[0])] = rows
    return found
