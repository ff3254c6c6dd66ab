"""measure(): one run from model and text to records; Run: what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pavinterp import store
from pavinterp.arguments import require_one_of, require_whole, require_yes_or_no, whole_numbers
from pavinterp.capture import certificate
from pavinterp.capture.paths import on_path
from pavinterp.certified import certified, merge
from pavinterp.corpora import Corpus
from pavinterp.corpora import corpus as read_corpus
from pavinterp.errors import UserError
from pavinterp.examples import examples as find_examples
from pavinterp.experiment import Experiment, with_numbers
from pavinterp.manifest import describe_run, work
from pavinterp.measures import all_measures
from pavinterp.models import ModelHandle, load, untouched
from pavinterp.norms import find_norms
from pavinterp.output import new_folder
from pavinterp.pieces import kept_pieces
from pavinterp.progress import progress_to
from pavinterp.stimuli import (
    BOS_POLICIES,
    MIN_TOKENS,
    Stimuli,
    check_stimuli,
    ordinary_token_ids,
    repeated_random_tokens,
    tokenise,
)
from pavinterp.sweep import LayerInfo, inspect, require_known
from pavinterp.tables import heads_table

DEFAULT_CONTEXT = 1024
DEFAULT_SEQUENCES = 64
PROBE_SEQUENCES = 16  # of repeated random tokens
PROBE_LENGTH = 257  # longest probe: BOS and two times 128 tokens
KEPT_SEQUENCES = 8  # whose single tests the head pages show

Progress = Callable[[str, int, int], None]  # stage, sequences done, sequences in all


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
    handle = on_path(model if isinstance(model, ModelHandle) else load(model), capture)
    shown = nullcontext(progress) if callable(progress) else progress_to(quiet=progress is False)
    with shown as stage, untouched(handle.model):
        shapes = inspect(handle)
        chosen = choose_layers(shapes, layers)
        require_known(handle, {info.layer: info.between for info in shapes_of(shapes, chosen)})
        stimuli = stimuli_for(handle, corpus, context, sequences, bos, seed)
        probe = _probe(handle, stimuli, bos, seed)
        norms = find_norms(handle, torch.from_numpy(stimuli.tokens[0][None, :MIN_TOKENS]).long().to(handle.device))
        arguments = {
            "context": max(len(t) for t in stimuli.tokens),
            "sequences": len(stimuli.tokens),
            "tests": "all" if tests is None else tests,
            "layers": "all" if layers is None else sorted(layers),
            "seed": seed,
            "batch": batch or "auto",
            "bos": bos,
            "capture": capture,
        }
        columns = [column.name for measure in all_measures() for column in measure.columns]
        this = work(handle, shapes, stimuli, "measure", arguments | {"columns": columns}) if resume else None
        with kept_pieces(this) as pieces:
            frames: dict[str, list[pd.DataFrame]] = {"records": [], "tests": [], "spectra": []}
            residuals: dict[int, list[float]] = {}
            rows = 0
            for what, label in ((stimuli, "text sequences"), (probe, "repeated random tokens")):
                own = [m for m in all_measures() if m.stimuli == what.kind]
                done, total, is_text = 0, len(what.tokens), what is stimuli
                stage(label, 0, total)
                for part in certified(
                    handle,
                    what,
                    own,
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


def check_arguments(
    tests: Any, layers: Any, seed: Any, batch: Any, bos: Any, progress: Any
) -> tuple[list[int] | None, int]:
    """The layers and the seed as plain numbers, whatever kind of numbers they were given as.

    Raises:
        UserError: an argument that `measure` and the experiments share is none that they take.
    """
    if tests is not None:
        require_whole("tests", tests, 1, " or None (every position)")
    if batch is not None:
        require_whole("batch", batch, 1)
    require_whole("seed", seed, 0)
    require_one_of("bos", bos, BOS_POLICIES)
    if not (progress is None or progress is False or callable(progress)):
        raise UserError(f"progress must be a function of (stage, done, total), None or False, got {progress!r:.40}")
    return whole_numbers("layers", layers, 0), int(seed)


def choose_layers(shapes: list[LayerInfo], layers: list[int] | None) -> set[int] | None:
    """Layers to capture; None is all. UserError where one has no attention."""
    if layers is None:
        return None
    known = {info.layer for info in shapes}
    wrong = sorted(set(layers) - known)
    if wrong or not layers:
        raise UserError(f"layers {wrong or layers}: choose among the attention layers {min(known)} to {max(known)}")
    return set(layers)


def shapes_of(shapes: list[LayerInfo], layers: set[int] | None) -> list[LayerInfo]:
    """Those of the layers that `choose_layers` gave."""
    return [info for info in shapes if layers is None or info.layer in layers]


def stimuli_for(
    handle: ModelHandle, corpus: Any, context: int | None, sequences: int | None, bos: str, seed: int
) -> Stimuli:
    """What the model is to read: ready Stimuli, or a corpus cut into sequences. UserError where it cannot be read."""
    if isinstance(corpus, Stimuli):
        if context is not None or sequences is not None:
            raise UserError("context= and sequences= with ready Stimuli: those are cut already; leave both out")
        check_stimuli(corpus, handle.vocabulary_size, handle.max_context)
        return corpus
    documents = corpus if isinstance(corpus, Corpus) else read_corpus(corpus)
    limit = handle.max_context
    if limit is not None and limit < MIN_TOKENS:
        raise UserError(f"{handle.name} has {limit} positions; a sequence needs at least {MIN_TOKENS}")
    if context is None:
        context = min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    require_whole("context", context, MIN_TOKENS)
    if limit is not None and context > limit:
        raise UserError(
            f"context {context} is beyond the {limit} positions of {handle.name}; use --context {limit} or less"
        )
    return tokenise(
        documents,
        handle.tokenizer,
        context=context,
        sequences=DEFAULT_SEQUENCES if sequences is None else sequences,
        bos=bos,
        seed=seed,
        vocabulary_size=handle.vocabulary_size,
    )


def vocabulary_of(handle: ModelHandle) -> Any:
    """What random tokens are drawn from: the tokenizer, or the number of tokens where there is none."""
    return handle.tokenizer or handle.vocabulary_size


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
