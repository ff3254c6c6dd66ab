"""The index page: what was measured, the pictures of all heads, their table, and how to read and repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from pavinterp.plots import across_heads
from pavinterp.plots.as_svg import svg
from pavinterp.plots.experiments import MAPS, number_map
from pavinterp.plots.words import fixed, head_name, number
from pavinterp.report import head_rows
from pavinterp.report.order import in_order
from pavinterp.report.page import render
from pavinterp.report.summary import picks, sentences, summarise

WIDE, NARROW = 760.0, 340.0  # pixels: a desktop's column and a phone's
FILES = {
    "heads.csv": "the table of heads, every column with its interval",
    "heads.parquet": "the same with its types",
    "records.parquet": "one row per sequence, layer and head: what the table is the mean of",
    "tests.parquet": "single tests of the first sequences (positions count from 0 there, from 1 on these pages)",
    "spectra.parquet": "spectra of the CSs, one a KV head",
    "examples.json": "the decoded associations of the head pages",
    "experiments": "the tables of the experiments, and how each came about",
    "manifest.json": "how this run came about",
}


def write_index(folder: Path, heads: pd.DataFrame, manifest: dict[str, Any], paged: frozenset[str]) -> Path:
    """Write index.html and figures/*.svg; returns the page's path. `paged` are the names of heads that have a page."""

    def address(name: str) -> str:
        return f"heads/{name}.html" if name in paged else ""

    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    drawn = {}
    maps = [number_map(heads, column) for column in MAPS if column in heads.columns]
    pictures = (across_heads.load_map(heads), across_heads.load_ranking(heads), across_heads.load_by_depth(heads))
    for picture in (*pictures, *maps):
        (figures / f"{picture.name}.svg").write_text(svg(picture, WIDE, alone=True), encoding="utf-8")
        drawn[picture.name] = {
            "wide": Markup(svg(picture, WIDE, address)),
            "narrow": Markup(svg(picture, NARROW, address)),
            "missing": picture.missing,
            "description": picture.description,
        }
    context = int(manifest["corpus"]["context"])
    summary = summarise(heads)
    page = render(
        "index",
        script=True,
        summary=summary,
        median=fixed(summary.median, 1),
        false_alarms=max(1, round(0.05 * summary.heads)),
        sentences=sentences(summary, manifest),
        figures=drawn,
        maps=[(name, title) for column, (name, title, _) in MAPS.items() if column in heads.columns],
        columns=head_rows.columns_of(heads),
        rows=head_rows.rows(heads, context),
        regimes=list(dict.fromkeys(heads["regime"])),
        reasons=head_rows.reasons(heads, context, heads.attrs.get("intervals", "")),
        picks=picks(heads),
        address=address,
        paged=len(paged),
        glossary=glossary(heads),
        intervals=heads.attrs.get("intervals", "") or manifest.get("intervals", ""),
        shared=shared_keys(heads),
        undefined=[head_name(*index) for index in heads.index[heads["effective_load"].isna()]],
        manifest=manifest,
        certificate=certificate(manifest["certificate"]),
        files={name: text for name, text in FILES.items() if (folder / name).exists()},
    )
    path = folder / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def glossary(heads: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Name, unit and definition of every column, in reading order."""
    units, texts = heads.attrs.get("units", {}), heads.attrs.get("descriptions", {})
    ends = [f"{name}{end}" for name in texts for end in ("_lo", "_hi")]
    names = [name for name in heads.columns if name not in ends]
    return [(name, units.get(name, ""), texts.get(name, "")) for name in in_order(names)]


def shared_keys(heads: pd.DataFrame) -> tuple[int, int]:
    """Number of KV heads and of query heads: statistics of CSs are one a KV head."""
    pairs = set(zip(heads.index.get_level_values("layer"), heads["kv_head"], strict=True))
    return len(pairs), len(heads)


def certificate(found: dict[str, Any]) -> dict[str, Any]:
    """The certificate as text: residuals by layer, the largest, the tolerance and how many rows were rebuilt."""
    return {
        "largest": number(found["largest"], 2),
        "tolerance": number(found["tolerance"], 2),
        "rows": f"{int(found['rows_checked']):,}",
        "by_layer": [(layer, number(residual, 2)) for layer, residual in found["by_layer"].items()],
        "passed": found["largest"] <= found["tolerance"],
    }
