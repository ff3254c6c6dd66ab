"""The experiments of classical conditioning on a model in context, from the model to learning curves and verdicts."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from pavinterp import __version__, plugins
from pavinterp import paradigms as library
from pavinterp.arguments import require_one_of, require_whole, require_yes_or_no
from pavinterp.errors import UserError
from pavinterp.experiment import Experiment
from pavinterp.experiments import conditioning_tables as tables
from pavinterp.experiments.carriers import CARRIER_FRAMES, Carriers, carriers
from pavinterp.experiments.conditioned_responses import Part, logits_of, measured, parts_of, prompts
from pavinterp.experiments.conditioning_recall import halving_table, recall_table
from pavinterp.experiments.conditioning_stimuli import Draw, Pool, Vocabulary, draw, needed, pool, vocabulary_of
from pavinterp.experiments.trial_layouts import TEXTS, Layout
from pavinterp.manifest import describe_model
from pavinterp.measuring import measure
from pavinterp.models import ModelHandle, load
from pavinterp.reading import Progress, check_arguments, reading
from pavinterp.stimuli import _left_as_it_was, _prefix
from pavinterp.sweep import LayerInfo
from pavinterp.tables import interval_words
from pavinterp.theory.capacity import isotropic_average_case_capacity, isotropic_worst_case_capacity
from pavinterp.theory.conditioning import MODELS
from pavinterp.theory.conditioning.fitting import Fit
from pavinterp.theory.schedules import Paradigm

DRAWS = 200
FOILS = 8
FRAMES = ("effects", "verdicts", "fits", "acquisition", "recall", "halving", "trials")
TEXT = {"usual_sequences": 16, "usual_context": 128}  # of the embedded text, for unigram logits


@dataclass(frozen=True)
class Conditioning:
    """What `condition` found.

    Attributes:
        trials: learning curves, see `conditioning_tables.curve_table`.
        effects: experimental minus control response in the test, see `conditioning_tables.effect_table`.
        verdicts: what each theory predicts of each paradigm against what was observed, see
            `conditioning_tables.verdict_table`.
        fits: one row a theory fitted to acquisition: `rate`, `scale` (nats for full strength), with intervals,
            `explained`, `at_bound`; empty where acquisition was not among the paradigms.
        acquisition: the curve that theories were fitted to, and theirs, see `conditioning_tables.acquisition_table`.
        recall, halving: of one pair among many, and where it halves, see `conditioning_recall`; empty without the
            paradigm `capacity`.
        tests: response in the test, a row paradigm x group x layout x draw.
        stimuli: which token played which part: a row paradigm x draw x stimulus.
        carriers: which heads carry it (`carriers.Carriers`); empty tables where that was not asked.
        manifest: how it came about; `notes` in it says what a reader must know.
    """

    trials: pd.DataFrame
    effects: pd.DataFrame
    verdicts: pd.DataFrame
    fits: pd.DataFrame
    acquisition: pd.DataFrame
    recall: pd.DataFrame
    halving: pd.DataFrame
    tests: pd.DataFrame
    stimuli: pd.DataFrame
    manifest: dict[str, Any]
    carriers: Carriers = field(default_factory=Carriers)

    def experiment(self) -> Experiment:
        """What a run keeps of it: curves, effects, verdicts, and what they say of heads."""
        heads = pd.MultiIndex.from_tuples(
            [(info["layer"], head) for info in self.manifest["heads"] for head in range(info["heads"])],
            names=["layer", "head"],
        )
        of_heads = self.carriers
        numbers = of_heads.heads if len(of_heads.heads.columns) else pd.DataFrame(index=heads)
        frames = {name: getattr(self, name) for name in FRAMES}
        frames |= {name: getattr(of_heads, name) for name in CARRIER_FRAMES}
        return Experiment("condition", numbers, {n: f for n, f in frames.items() if len(f)}, self.manifest)


def condition(
    model: ModelHandle | str | Any = "demo",
    *,
    paradigms: Iterable[str | Path | Paradigm] | None = None,
    draws: int = DRAWS,
    layouts: Iterable[str] | None = None,
    stimuli: str | Path = "words",
    foils: int = FOILS,
    margin: float | None = None,
    heads: bool = True,
    batch: int | None = None,
    seed: int = 0,
    bos: str = "auto",
    resume: bool = False,
    progress: Progress | Literal[False] | None = None,
    command: str | None = None,
) -> Conditioning:
    """Pavlov's experiments on a language model: paradigms of classical conditioning written as prompts.

    Every paradigm has an experimental and a control group. A prompt is the trials of a group, stimuli single tokens of
    the model's vocabulary, and the test at its end; response strength is the logit of the US less the mean logit of
    control USs (`conditioned_responses`), measured at every trial. Both groups of a draw have the same stimuli, so
    effects are paired; each layout of a trial is reported, and all together with layouts as a random effect.

    Args:
        model: a handle from `load`, or anything `load` takes.
        paradigms: names of built-in ones, `.toml` files, or `Paradigm`s; default all that are built in, but for those
            whose prompts are longer than the model has positions (the manifest names them).
        draws: of stimuli, for every paradigm.
        layouts: of a trial, of `trial_layouts.TEXTS`; default all.
        stimuli: `words`, `random` (any tokens), `nonsense` (letters without a vowel), or a text file with one a line.
        foils: control USs of a draw.
        margin: half width of effects that count as none, nats; default `conditioning_tables.equivalence_margin`.
        heads: whether to ask which heads carry it, in the first 48 draws: direct attribution, strength on the US, and
            what is left where heads respond with their mean (`carriers.Carriers`).
        batch: prompts a forward pass; default as many as give 256 MB of logits.
        seed: of stimuli, orders and the bootstrap.
        bos: as in `measure`.
        resume: whether finished parts are kept in the user's cache until all is done, so that a process that is
            interrupted can be started again and goes on from there; not with hooks on the model.
        progress: called with stage, done and total; None shows it on standard error, False shows nothing.
        command: command line for the manifest.

    Raises:
        UserError: the model cannot be measured; no such paradigm or layout; too few stimuli; prompts that are too long.
    """
    require_whole("draws", draws, 2)
    require_whole("foils", foils, 1)
    require_yes_or_no("resume", resume)
    require_yes_or_no("heads", heads)
    if margin is not None and not (isinstance(margin, (int, float)) and 0 < margin < float("inf")):
        raise UserError(f"margin must be a number of nats above 0, or None, got {margin!r:.40}")
    _, seed = check_arguments(None, None, seed, batch, bos, progress)
    chosen, names = chosen_paradigms(paradigms), chosen_layouts(layouts)
    loaded = model if isinstance(model, ModelHandle) else load(model)
    beside = _beside(loaded, seed, bos, resume, progress) if heads else None
    with reading(
        loaded, "demo", context=None, sequences=None, layers=None, seed=seed, bos=bos, capture="auto",
        progress=progress, **TEXT,
    ) as read:  # fmt: skip
        handle = read.handle
        with _left_as_it_was(handle.tokenizer):
            start = _prefix(handle.tokenizer, bos, "")
        vocabulary, written = vocabulary_of(handle, stimuli, names, read.text, seed)
        pools = {paradigm.name: pool(vocabulary, needed(paradigm, foils)) for paradigm in chosen}
        drawn = {
            paradigm.name: [draw(vocabulary, pools[paradigm.name], paradigm, foils, seed, i) for i in range(draws)]
            for paradigm in chosen
        }
        parts, left_out = _that_fit(
            parts_of(chosen, written), drawn, start, seed, handle.max_context, handle.name, paradigms is None
        )
        chosen = [paradigm for paradigm in chosen if paradigm.name not in left_out]
        own = {
            "paradigms": [paradigm.name for paradigm in chosen],
            "draws": int(draws),
            "layouts": names,
            "stimuli": str(stimuli),
            "foils": int(foils),
            "seed": seed,
            "bos": bos,
        }
        what = {"schedules": _digest(chosen), "vocabulary": _digest([vocabulary.ids.tolist()])}
        with read.pieces("condition", read.arguments(**own, **what), resume) as pieces:
            records = measured(
                logits_of(handle), parts, drawn, start=start, seed=seed, device=handle.device,
                vocabulary=handle.vocabulary_size, batch=batch, stage=read.stage, pieces=pieces,
            )  # fmt: skip
            outcomes, of_heads = tables.outcome_table(records), Carriers()
            if beside is not None:
                of_heads = carriers(
                    handle, chosen, parts, drawn, outcomes, beside, read.text, start=start, seed=seed, batch=batch,
                    stage=read.stage, pieces=pieces,
                )  # fmt: skip
        effects, fits, width, found = analysed(records, chosen, margin, seed)
        manifest = {
            "pavinterp_version": __version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "model": describe_model(handle, read.shapes),
            "heads": [{"layer": info.layer, "heads": info.heads} for info in read.shapes],
            "arguments": own | {"margin": margin, "batch": batch},
            "margin": width,
            "stimuli": _stimuli_words(vocabulary, pools, drawn),
            "layouts": {one.name: {"between": one.between, "after": one.after} for one in written},
            "left_out": left_out,
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("torch", "transformers")}
            | plugins.versions(),
            "intervals": interval_words("draws of stimuli", draws),
            "notes": _notes(written, effects, left_out, handle) + list(of_heads.notes),
        }
    return Conditioning(
        trials=tables.curve_table(records, seed),
        effects=effects,
        verdicts=found,
        fits=_fit_frame(fits),
        acquisition=tables.acquisition_table(records, chosen, fits, seed),
        recall=recall_table(records, chosen, seed),
        halving=halving_table(records, chosen, _bounds(read.shapes), seed),
        tests=outcomes,
        stimuli=_stimuli_frame(drawn, chosen, handle),
        carriers=of_heads,
        manifest=manifest,
    )


def _beside(
    handle: ModelHandle, seed: int, bos: str, resume: bool, progress: Progress | Literal[False] | None
) -> pd.DataFrame:
    """The heads table of a small measurement on the embedded text, to set heads that carry conditioning against."""
    context = min(TEXT["usual_context"], handle.max_context or TEXT["usual_context"])
    run = measure(
        handle, "demo", context=context, sequences=8, seed=seed, bos=bos, examples=False, resume=resume,
        progress=progress,
    )  # fmt: skip
    return run.heads()


def _bounds(shapes: Sequence[LayerInfo]) -> dict[str, float]:
    """Medians over heads of what the theorem allows for their widths."""
    d_k = np.repeat([float(info.d_k) for info in shapes], [info.heads for info in shapes])
    return {
        "capacity_worst": float(np.median(isotropic_worst_case_capacity(d_k))),
        "capacity_average": float(np.median(isotropic_average_case_capacity(d_k))),
    }


def analysed(
    records: pd.DataFrame, paradigms: Sequence[Paradigm], margin: float | None, seed: int
) -> tuple[pd.DataFrame, list[Fit], float, pd.DataFrame]:
    """Effects, theories fitted to acquisition, the equivalence margin, and verdicts, from records of any model."""
    effects = tables.effect_table(tables.outcome_table(records), paradigms, seed)
    fits = tables.acquisition_fits(records, paradigms, MODELS, seed)
    width = tables.equivalence_margin(effects, margin)
    return effects, fits, width, tables.verdict_table(effects, paradigms, fits, width)


def chosen_paradigms(given: Iterable[str | Path | Paradigm] | None) -> list[Paradigm]:
    """Paradigms by name, file, or as they are; None is all that there are.

    Raises:
        UserError: there is none of that name, or two have the same.
    """
    if given is None:
        return list(library.available().values())
    if isinstance(given, str):
        raise UserError(f"paradigms must be a list, such as [{given!r:.40}]")
    found = [one if isinstance(one, Paradigm) else library.load(one) for one in given]
    names = [paradigm.name for paradigm in found]
    if not found:
        raise UserError(f"no paradigm given: choose among {', '.join(library.available())}")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(f"paradigm {twice[0]} is given twice: give each once, or another name in its file")
    return found


def chosen_layouts(given: Iterable[str] | None) -> list[str]:
    """Layouts by name; None is all. UserError where one is unknown or none is given."""
    names = list(TEXTS) if given is None else list(dict.fromkeys([given] if isinstance(given, str) else given))
    if not names:
        raise UserError(f"no layout given: choose among {', '.join(TEXTS)}")
    for name in names:
        require_one_of("each of layouts", name, tuple(TEXTS))
    return names


def _that_fit(
    parts: list[Part],
    draws: dict[str, list[Draw]],
    start: list[int],
    seed: int,
    positions: int | None,
    name: str,
    may_leave_out: bool,
) -> tuple[list[Part], dict[str, str]]:
    """The parts whose prompts the model has positions for, and why paradigms were left out."""
    if positions is None:
        return parts, {}
    too_long: dict[str, str] = {}
    for part in parts:
        mine = draws[part.paradigm.name][:1]
        length = len(prompts(part.paradigm, part.group, mine, part.layout, start, seed, part.cs)[0].prompt.tokens)
        if length > positions:
            too_long[part.paradigm.name] = (
                f"{part.paradigm.name}: {length} tokens in the layout {part.layout.name}, and {name} has {positions} "
                "positions"
            )
    if too_long and (not may_leave_out or len(too_long) == len(draws)):
        raise UserError(f"{next(iter(too_long.values()))}: leave it out, or take other --layouts")
    return [part for part in parts if part.paradigm.name not in too_long], too_long


def _digest(values: Sequence[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _stimuli_words(vocabulary: Vocabulary, pools: dict[str, Pool], draws: dict[str, list[Draw]]) -> dict[str, Any]:
    """What stimuli were drawn from, and how alike they are, by paradigm."""
    return {
        "tokens": len(vocabulary.ids),
        "what": vocabulary.what,
        "pools": {
            name: {
                "tokens": len(one.places),
                "logit_window": one.logit_window,
                "norm_window": one.norm_window,
                "cosines": {
                    f"{a} ~ {b}": float(np.mean([drawn.cosines[a, b] for drawn in draws[name]]))
                    for a, b in (draws[name][0].cosines if draws[name] else ())
                },
            }
            for name, one in pools.items()
        },
    }


def _stimuli_frame(draws: dict[str, list[Draw]], paradigms: Sequence[Paradigm], handle: ModelHandle) -> pd.DataFrame:
    tokenizer: Any = handle.tokenizer
    rows = [
        (paradigm.name, number, name, token)
        for paradigm in paradigms
        for number, one in enumerate(draws[paradigm.name])
        for name, token in (*one.tokens.items(), *((f"foil {i + 1}", int(t)) for i, t in enumerate(one.foils)))
    ]
    frame = pd.DataFrame(rows, columns=["paradigm", "draw", "stimulus", "token"])
    texts = {token: tokenizer.decode([token]) for token in frame["token"].unique().tolist()}
    return frame.assign(text=frame["token"].map(texts))


def _fit_frame(fits: Sequence[Fit]) -> pd.DataFrame:
    columns = ["rate", "rate_lo", "rate_hi", "scale", "scale_lo", "scale_hi", "explained", "at_bound"]
    rows = [(one.rate, *one.rate_interval, one.scale, *one.scale_interval, one.explained, one.at_bound) for one in fits]
    return pd.DataFrame(rows, columns=columns, index=pd.Index([one.model for one in fits], name="model"))


def _notes(
    layouts: Sequence[Layout], effects: pd.DataFrame, left_out: dict[str, str], handle: ModelHandle
) -> list[str]:
    """What a reader of the tables must know beside the definitions."""
    notes = []
    if len(layouts) == 1:
        notes.append(f"One layout ({layouts[0].name}): nothing here says whether results hold for another.")
    else:
        notes.append(
            f"{len(layouts)} layouts: over all of them, intervals allow for their differences with few degrees of "
            "freedom, so they are wide where layouts disagree."
        )
    uneven = [name for name, often in effects.groupby("paradigm", sort=False)["us_as_often"].all().items() if not often]
    if uneven:
        notes.append(
            f"In {', '.join(map(str, uneven))} the groups of some contrast present the US unequally often: what "
            "frequency does to the US is in those effects."
        )
    notes += [f"Left out: {said}." for said in left_out.values()]
    if handle.dtype not in (torch.float32, torch.float64):
        notes.append(f"Logits were computed in {handle.dtype}: differences under its rounding are noise.")
    return notes
