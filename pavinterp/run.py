"""measure(): one run from model and text to records; Run: what came of it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pavinterp import store
from pavinterp.arguments import require_yes_or_no
from pavinterp.capture import certificate
from pavinterp.certified import certified, merge
from pavinterp.corpora import Corpus
from pavinterp.errors import UserError
from pavinterp.examples import examples as find_examples
from pavinterp.experiment import Experiment, with_numbers
from pavinterp.manifest import describe_run
from pavinterp.measures import all_measures
from pavinterp.models import ModelHandle
from pavinterp.norms import find_norms
from pavinterp.output import new_folder
from pavinterp.reading import Progress, check_arguments, reading, shapes_of, vocabulary_of
from pavinterp.stimuli import (
    MIN_TOKENS,
    Stimuli,
    ordinary_token_ids,
    repeated_random_tokens,
)
from pavinterp.sweep import LayerInfo
from pavinterp.tables import heads_table

CONTEXT, SEQUENCES = 1024, 64  # where not told
PROBE_SEQUENCES = 16  # of repeated random tokens
PROBE_LENGTH = 257  # longest probe: BOS and two times 128 tokens
KEPT_SEQUENCES = 8  # whose single tests the head pages show


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
            found: what `pavinterp.explain`, `memory_capacity`, `needed_associations`, `linearisation_cost` or
                `association_budget` returned for the same model.

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


def measure(
    model: ModelHandle | str | Any = "demo",
    corpus: Corpus | Stimuli | str | Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    tests: int | None = 64,
    layers: list[int] | None = None,
    seed: int = 0,
    batch: int | None = None,
    bos: str = "auto",
    capture: str = "auto",
    examples: bool = True,
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Run:
    """Measure every attention head of a model on a text.

    Args:
        model: a handle from `load`, or anything `load` takes.
        corpus: a corpus from `corpus`, anything that takes, or ready Stimuli.
        context: tokens a sequence; default 1,024 or the model's positions, whichever is less.
        sequences: how many; default 64, or as many as the text has.
        tests: positions tested a sequence; None tests all.
        layers: layer indices; default all.
        seed: of sampling and bootstrap.
        batch: sequences a forward pass; default about 4,096 tokens.
        bos: "auto" (what the tokenizer does), "always" or "never".
        capture: "attention_interface" (transformers' registry), "transformer_lens" (the hooks of a TransformerBridge;
            one is made around a copy where none was given), or "auto": the latter for a TransformerBridge.
        examples: whether to decode each head's strongest associations for its page.
        resume: whether finished batches are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest; default the equivalent call's.

    Raises:
        UserError: the model or text cannot be measured; says what, where, what to do. Also where the
            certificate fails: no numbers are reported then.
    """
    started = time.monotonic()
    layers, seed = check_arguments(tests, layers, seed, batch, bos, progress)
    require_yes_or_no("resume", resume)
    own = {"tests": "all" if tests is None else tests, "batch": batch or "auto"}
    own |= {"seed": seed, "bos": bos, "capture": capture}
    columns = [column.name for measure in all_measures() for column in measure.columns]
    with (
        reading(
            model,
            corpus,
            context=context,
            sequences=sequences,
            usual_sequences=SEQUENCES,
            usual_context=CONTEXT,
            layers=layers,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
        ) as read,
        read.pieces("measure", read.arguments(**own, columns=columns), resume) as pieces,
    ):
        handle, shapes, chosen, stimuli, stage = read.handle, read.shapes, read.layers, read.text, read.stage
        arguments = read.arguments(**own)
        probe = _probe(handle, stimuli, bos, seed)
        norms = find_norms(handle, torch.from_numpy(stimuli.tokens[0][None, :MIN_TOKENS]).long().to(handle.device))
        frames: dict[str, list[pd.DataFrame]] = {"records": [], "tests": [], "spectra": []}
        residuals: dict[int, list[float]] = {}
        rows = 0
        for what, label in ((stimuli, "text sequences"), (probe, "repeated random tokens")):
            measures = [m for m in all_measures() if m.stimuli == what.kind]
            done, total, is_text = 0, len(what.tokens), what is stimuli
            stage(label, 0, total)
            for part in certified(
                handle,
                what,
                measures,
                tests=tests if is_text else None,
                layers=chosen,
                batch=batch,
                seed=seed,
                keep=KEPT_SEQUENCES if is_text else 0,
                pieces=pieces,
                name=label,
            ):
                merge(residuals, part.residuals)
                shapes = [replace(info, between=part.between.get(info.layer, info.between)) for info in shapes]
                _require_finite(part.records)
                rows += part.rows_checked
                for name, frame in (("records", part.records), ("tests", part.tests), ("spectra", part.spectra)):
                    if not frame.empty:
                        frames[name].append(frame)
                done += len(part.sequences)
                stage(label, done, total)
        found = []
        if examples:
            stage("strongest associations", 0, 1)
            found = find_examples(handle, stimuli, norms, tests=tests, layers=chosen, seed=seed)
            stage("strongest associations", 1, 1)
    records = pd.concat(frames["records"], ignore_index=True).sort_values(
        ["stimuli", "sequence", "layer", "head"], ascending=[False, True, True, True], ignore_index=True
    )
    records["stimuli"] = records["stimuli"].astype("category")
    tested = pd.concat(frames["tests"], ignore_index=True)
    spectra = pd.concat(frames["spectra"], ignore_index=True).groupby(["layer", "kv_head", "rank"])["eigenvalue"].mean()
    measured = shapes_of(shapes, chosen)
    manifest = describe_run(handle, shapes, measured, norms, stimuli, probe, records, arguments, command)
    if sequences is not None and sequences > len(stimuli.tokens):
        manifest["notes"].append(
            f"{sequences} sequences were asked for; the text has {len(stimuli.tokens)} of {arguments['context']} "
            "tokens."
        )
    manifest["certificate"] = {
        "tolerance": certificate.tolerance(handle.dtype),
        "largest": max(max(row) for row in residuals.values()),
        "by_layer": {str(layer): max(row) for layer, row in sorted(residuals.items())},
        "rows_checked": rows,
    }
    manifest["wall_seconds"] = round(time.monotonic() - started, 1)
    run = Run(records, measured, store.Details(tested, spectra.reset_index(), found), manifest)
    manifest["intervals"] = run.heads().attrs["intervals"]
    return run


def _require_finite(records: pd.DataFrame) -> None:
    """UserError where what a head writes is beyond float32, so that its load could not be told from silence."""
    if "response_norm" in records.columns and np.isinf(records["response_norm"]).any():
        worst = records[np.isinf(records["response_norm"])].iloc[0]
        raise UserError(
            f"layer {worst['layer']} head {worst['head']} writes more than float32 holds: check the weights, or "
            "measure in float64"
        )


def _probe(handle: ModelHandle, stimuli: Stimuli, bos: str, seed: int) -> Stimuli:
    longest = max(len(t) for t in stimuli.tokens)
    return repeated_random_tokens(
        vocabulary_of(handle),
        length=probe_length(handle, min(PROBE_LENGTH, max(longest, 16))),
        sequences=PROBE_SEQUENCES,
        bos=bos if handle.tokenizer is not None else "never",
        seed=seed,
        below=handle.vocabulary_size,
    )


def probe_length(handle: ModelHandle, wanted: int) -> int:
    """`wanted`, or what the model's positions and two copies of different tokens of its vocabulary allow."""
    different = ordinary_token_ids(vocabulary_of(handle), handle.vocabulary_size)
    return min(wanted, handle.max_context or wanted, 2 * len(different))
