"""The experiment of capacity: how many of its own pairs each head's memory holds, beside theory and controls."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pandas as pd

from pavinterp.arguments import require_yes_or_no
from pavinterp.capture.paths import on_path
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment, definitions
from pavinterp.experiments.capacities import COLUMNS, ratios, tables
from pavinterp.experiments.own_memories import LOADS, Retrieval, memories
from pavinterp.experiments.random_weights import untrained
from pavinterp.experiments.resampling import interval_note
from pavinterp.experiments.rules import choose_rules
from pavinterp.manifest import describe_experiment
from pavinterp.measures import all_measures
from pavinterp.models import ModelHandle, load, untouched
from pavinterp.reading import Progress, certified_records, check_arguments, reading
from pavinterp.sweep import LayerInfo
from pavinterp.tables import heads_table

SEQUENCES, SAMPLED = 16, 32
PREDICTIONS = ("d_eff", "d_eff_query", "coherence", "own_capacity_worst", "own_capacity_average")


@dataclass(repr=False)
class Capacity:
    """What `memory_capacity` found.

    Attributes:
        memories: one row per head x probe x rule x cs x metric x weights: `capacity` and `error_free` (associations)
            with intervals, `largest` load probed, `trained_over_random`.
        heads: one row a head: d_k, isotropic `capacity_worst` and `capacity_average`, and its own CSs' `d_eff`,
            `d_eff_query`, `coherence`, `own_capacity_worst`, `own_capacity_average` with intervals.
        curves: one row per memory x load: squared fidelity `f2` with its interval.
        manifest: how it came about.

    `memories.attrs` carries "units" and "descriptions".
    """

    memories: pd.DataFrame
    heads: pd.DataFrame
    curves: pd.DataFrame
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        model, text = self.manifest["model"], self.manifest["corpus"]
        return (
            f"Capacity({model['name']}: {len(self.heads)} heads, {text['sequences']} sequences of "
            f"{text['context']} tokens; .memories, .heads, .curves, .by_layer(), .manifest)"
        )

    def experiment(self) -> Experiment:
        """What a run keeps of it: each head's capacity by its Hebbian memory and by its softmax, and the curves."""
        shown = {
            "capacity_hebbian": (("stored", "hebbian", "centred", "euclidean", "trained"), "its Hebbian memory"),
            "capacity_hebbian_random": (
                ("stored", "hebbian", "centred", "euclidean", "random"),
                "a Hebbian memory of the same head with random weights",
            ),
            "capacity_softmax": (("stored", "softmax", "centred", "euclidean", "trained"), "its softmax"),
        }
        numbers, said = pd.DataFrame(index=self.heads.index), {}
        for name, (key, whose) in shown.items():
            if key not in {key[2:] for key in self.memories.index}:
                continue
            rows = self.memories.xs(key, level=("probe", "rule", "cs", "metric", "weights"))
            for end in ("", "_lo", "_hi"):
                numbers[f"{name}{end}"] = rows[f"capacity{end}"]
            said[name] = f"Associations of the head's own pairs that {whose} holds at a squared fidelity of 1/2."
        numbers.attrs = definitions({name: ("associations", words) for name, words in said.items()})
        return Experiment("capacity", numbers, {"memories": self.memories, "curves": self.curves}, self.manifest)

    def by_layer(self) -> pd.DataFrame:
        """Median over a layer's heads of each memory's capacity (CSs centred, Euclidean)."""
        mine = self.memories["capacity"].xs(("centred", "euclidean"), level=("cs", "metric"))
        table = mine.groupby(["layer", "weights", "probe", "rule"]).median()
        return table.unstack(["weights", "probe", "rule"])


def memory_capacity(
    model: ModelHandle | str | Any = "demo",
    corpus: Any = "demo",
    *,
    context: int | None = None,
    sequences: int | None = None,
    layers: list[int] | None = None,
    rules: Collection[str] | None = None,
    control: bool = True,
    seed: int = 0,
    batch: int | None = None,
    bos: str = "auto",
    capture: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Capacity:
    """How many associations a memory of each head's own pairs holds, by rule, beside theory and controls.

    Memories of N = 1, 2, 3, ... pairs (k, u = v R) drawn from a context are probed in two ways, see
    `own_memories.stored_probes` (with every stored CS, as the theorem has it) and `own_memories.test_probes` (with the
    head's own test stimuli). Squared fidelity is that of theory section 2, with USs about their mean over the context.
    The capacity is the N at which it has fallen to 1/2; beside it the largest N without any error, the same with
    isotropic CSs of the same d_k and the head's own USs (the theorem's assumption on CSs alone), and the same
    architecture with random weights on the same text: what training did to capacity. Theory for the CSs' spectrum
    stands in `heads` (`own_capacity_average = 1 + d_eff`).

    Args:
        model, corpus, layers, seed, batch, bos, capture, progress, command: as for `pavinterp.measure`.
        context: tokens a sequence; default 256, or the model's positions if fewer.
        sequences: default 16, or as many as the text has.
        rules: names of `pavinterp.theory.rules.RULES`; default all. covariance is hebbian here: the means that it
            takes off are those of the context, not of the N pairs.
        control: whether the same architecture with random weights is measured too.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.

    Raises:
        UserError: the model or text cannot be measured, or the control cannot be made.
    """
    started = time.monotonic()
    require_yes_or_no("control", control)
    require_yes_or_no("resume", resume)
    layers, seed = check_arguments(None, layers, seed, batch, bos, progress)
    names = choose_rules(rules)
    if names == ["covariance"]:
        raise UserError("covariance is hebbian here, with CSs and USs about the context's means: ask for hebbian")
    plain = model if isinstance(model, ModelHandle) else load(model)
    of = memories(names)
    own = {"rules": names, "control": control, "seed": seed, "bos": bos, "capture": capture}
    with (
        reading(
            plain,
            corpus,
            context=context,
            sequences=sequences,
            usual_sequences=SEQUENCES,
            layers=layers,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
        ) as read,
        read.pieces("capacity", read.arguments(**own), resume) as pieces,
    ):
        loads = [n for n in LOADS if n <= max(len(tokens) for tokens in read.text.tokens)]
        measures = [m for m in all_measures() if m.stimuli == "text"] + [Retrieval(of, loads)]
        records_of = partial(
            certified_records,
            text=read.text,
            measures=measures,
            layers=read.layers,
            tests=SAMPLED,
            batch=batch,
            seed=seed,
            stage=read.stage,
            pieces=pieces,
        )
        records, residuals = records_of(read.handle, what="own memories")
        table, curves, drawn = tables(records, of, loads, "trained", seed)
        if control:
            twin = on_path(untrained(plain, seed), capture)
            with untouched(twin.model):
                other, _ = records_of(twin, what="the same with random weights")
            control_table, control_curves, control_drawn = tables(other, of, loads, "random", seed)
            table = ratios(pd.concat([table, control_table]), drawn, control_drawn)
            curves = pd.concat([curves, control_curves])
    table = table.sort_index()
    table.attrs = definitions(COLUMNS)
    note = interval_note(records)
    manifest = describe_experiment(read.handle, read.shapes, read.text, read.arguments(**own), residuals, note, command)
    manifest["wall_seconds"] = round(time.monotonic() - started, 1)
    return Capacity(table, _predictions(records, read.chosen, seed), curves.sort_index(), manifest)


def _predictions(records: pd.DataFrame, shapes: list[LayerInfo], seed: int) -> pd.DataFrame:
    """What theory says of each head's CSs."""
    table = heads_table(records, shapes, seed)
    wanted = ["d_k", "d_v", "window", "capacity_worst", "capacity_average"]
    wanted += [name + end for name in PREDICTIONS for end in ("", "_lo", "_hi")]
    return table[[name for name in wanted if name in table.columns]]
