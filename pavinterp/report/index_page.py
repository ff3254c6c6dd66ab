"""The index page: what was measured, the pictures of all heads, their table, and how to read and repeat it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from pavinterp.experiment import Experiment, frames_of
from pavinterp.plots import across_heads, propagation, redundancy
from pavinterp.plots.as_svg import svg
from pavinterp.plots.experiments import MAPS, number_map
from pavinterp.plots.marks import Picture
from pavinterp.plots.words import fixed, head_name, number
from pavinterp.report import conditioning_section, head_rows
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


# "experiment.frame" that a figure is drawn from, if the run has it: title, picture and caption.
OF_EXPERIMENTS: dict[str, tuple[str, Callable[[pd.DataFrame], Picture], str]] = {
    "propagate.heads": (
        "Retrieval error as the load predicts it",
        propagation.infidelity_calibration,
        "Infidelity 1 − f²: the share of a response that is not the US of its strongest association. The theorem "
        "predicts it from the effective load alone, for random USs: heads on the line behave as it says.",
    ),
    "propagate.gain": (
        "What becomes of an error",
        propagation.gain_map,
        "Interference of a layer’s own, small and at other positions than its own, is added to what its attention "
        "writes. The gain is the relative change of the residual stream after a later block over that after the "
        "block itself, on a logarithmic scale: below 1 errors die down, above 1 they grow.",
    ),
    "propagate.ends": (
        "What an error costs, by layer",
        propagation.end_gains,
        "KL divergence of the next-token predictions over the squared relative change of the residual stream after "
        "the layer’s block. Where a layer’s own interference costs more than noise of the same norm, the layers "
        "behind it listen to the directions that it writes in.",
    ),
    "redundancy.layers": (
        "Distinct heads",
        redundancy.distinct_heads,
        "The effective number of distinct heads of each layer (participation ratio of the eigenvalues of the linear "
        "CKA between what its heads write), beside how many it has.",
    ),
    "redundancy.pairs": (
        "Do alike heads stand in for each other?",
        redundancy.redundancy_of_pairs,
        "Pairs of heads of a layer, mean-ablated one by one and together. Interaction: the KL divergence of both above "
        "the sum of the two alone, over twice their geometric mean; for small effects the cosine between what the two "
        "do to predictions. Above 0 they do the same, and one may stand in for the other (the index of the loss in "
        "the tables tells), below 0 they work against each other. Alignment is that of their writes to the residual "
        "stream: 1 the same, −1 the opposite.",
    ),
}


def pictures_of(heads: pd.DataFrame, experiments: Mapping[str, Experiment]) -> list[Picture]:
    """Every picture of the index page, in its order."""
    titled = (*_of_experiments(experiments), *_of_conditioning(experiments))
    return [*_of_heads(heads), *(picture for _, picture, _ in titled)]


def _of_heads(heads: pd.DataFrame) -> list[Picture]:
    loads = [across_heads.load_map(heads), across_heads.load_ranking(heads), across_heads.load_by_depth(heads)]
    return loads + [number_map(heads, column) for column in MAPS if column in heads.columns]


def _of_experiments(experiments: Mapping[str, Experiment]) -> list[tuple[str, Picture, str]]:
    frames = frames_of(experiments)
    return [
        (title, draw(frames[name]), caption)
        for name, (title, draw, caption) in OF_EXPERIMENTS.items()
        if name in frames
    ]


def _of_conditioning(experiments: Mapping[str, Experiment]) -> list[tuple[str, Picture, str]]:
    found = experiments.get("condition")
    return [] if found is None else conditioning_section.pictures(found.frames)


def write_index(
    folder: Path,
    heads: pd.DataFrame,
    manifest: dict[str, Any],
    paged: frozenset[str],
    experiments: Mapping[str, Experiment],
) -> Path:
    """Write index.html and figures/*.svg; returns the page's path.

    Args:
        folder: where they go.
        heads, manifest: of the run.
        paged: names of the heads that have a page.
        experiments: of the run, by name.
    """

    def address(name: str) -> str:
        return f"heads/{name}.html" if name in paged else ""

    figures = folder / "figures"
    figures.mkdir(exist_ok=True)
    drawn = {}
    pavlov = experiments.get("condition")
    found, own = _of_experiments(experiments), _of_conditioning(experiments)
    for picture in (*_of_heads(heads), *(picture for _, picture, _ in (*found, *own))):
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
        of_experiments=[(picture.name, title, caption) for title, picture, caption in found],
        conditioning=None if pavlov is None else conditioning_section.section(pavlov.frames, pavlov.manifest, heads),
        conditioning_figures=[(picture.name, title, caption) for title, picture, caption in own],
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
