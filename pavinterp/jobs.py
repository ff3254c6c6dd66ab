"""Job: one measurement as a command or a sweep of models gives it, from the names of things to its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pavinterp.command_steps import load_model, read_text

if TYPE_CHECKING:
    from pavinterp.corpora import Corpus
    from pavinterp.models import ModelHandle
    from pavinterp.progress import Progress
    from pavinterp.run import Run

OF_MODEL = ("model", "revision", "dtype", "device", "trust_remote_code", "tokenizer")
OF_TEXT = ("corpus", "text_field", "max_documents")


@dataclass(frozen=True)
class Job:
    """What to load, read, measure and write; plain values, so that it can travel to another machine.

    Attributes:
        options: of `load` and `corpus`: those that `OF_MODEL` and `OF_TEXT` name.
        measure: arguments of `measure` that its numbers depend on.
        folder: where the run goes.
        overwrite: whether it may replace a run there.
        with_pages: whether pages are written too, not only tables.
        pages: layers whose heads get a page; None is all.
        experiments: names of those to make too, as `report --with` takes them.
        fast: whether those are first looks only.
        resume, parts: as for `measure`.
        command: for the manifest.
        sweep: arguments of the sweep that it is part of, for the manifest; None where it is of none.
    """

    options: Mapping[str, Any]
    measure: Mapping[str, Any]
    folder: Path
    overwrite: bool = False
    with_pages: bool = True
    pages: list[int] | None = None
    experiments: Sequence[str] = ()
    fast: bool = False
    resume: bool = True
    parts: Path | None = None
    command: str | None = None
    sweep: Mapping[str, Any] | None = None


@dataclass
class Loaded:
    """The model and the text that were loaded last: jobs and shares of jobs that follow one another use them again."""

    kept: dict[tuple[str, ...], tuple[dict[str, Any], Any]] = field(default_factory=dict)

    def model(self, job: Job, progress: Progress) -> ModelHandle:
        """The model of a job."""
        model: ModelHandle = self._of(job, OF_MODEL, load_model, progress)
        return model

    def text(self, job: Job, progress: Progress) -> Corpus:
        """The text of a job."""
        text: Corpus = self._of(job, OF_TEXT, read_text, progress)
        return text

    def _of(self, job: Job, names: tuple[str, ...], make: Callable[..., Any], progress: Progress) -> Any:
        wanted = {name: job.options[name] for name in names}
        if names not in self.kept or self.kept[names][0] != wanted:
            self.kept.pop(names, None)  # before the next: two need not fit
            self.kept[names] = wanted, make(wanted, progress)
        return self.kept[names][1]


def share(job: Job, shard: tuple[int, int], progress: Progress, loaded: Loaded) -> int:
    """Measure the i-th of N shares of a job and leave it in its folder of parts; returns the batches of the share.

    Raises:
        UserError: as for `measure_shard`.
    """
    import pavinterp as pi

    text, handle = loaded.text(job, progress), loaded.model(job, progress)
    assert job.parts is not None
    return pi.measure_shard(handle, text, shard=shard, parts=job.parts, progress=progress, **job.measure)


def is_done(job: Job, progress: Progress, loaded: Loaded) -> bool:
    """Whether the run in a job's folder is of this very model, text and arguments; model and text are read for it.

    Raises:
        UserError: as for `measure`.
    """
    from pavinterp import store
    from pavinterp.measuring import work_of

    text, handle = loaded.text(job, progress), loaded.model(job, progress)
    return store.read_manifest(job.folder).get("work") == work_of(handle, text, **job.measure)


def perform(job: Job, progress: Progress, loaded: Loaded) -> Run:
    """Do a job: measure what no share has left, make its experiments, write its folder.

    Raises:
        UserError: the model or text cannot be measured, the folder cannot be written, or another process writes it.
    """
    import pavinterp as pi
    from pavinterp.cache import alone
    from pavinterp.experiment_commands import EXPERIMENTS, first_look
    from pavinterp.options import check_pages
    from pavinterp.pieces import until_all_is_done

    with alone(job.folder), until_all_is_done():
        text, handle = loaded.text(job, progress), loaded.model(job, progress)
        check_pages(job.pages, job.measure["layers"], handle.model.config)
        same: dict[str, Any] = {"resume": job.resume, "progress": progress, "command": job.command}
        run = pi.measure(handle, text, examples=job.with_pages, parts=job.parts, **job.measure, **same)
        for name in job.experiments:
            less: dict[str, Any] = first_look(name, handle) if job.fast else {}
            if name == "condition":  # all layers, and prompts of its own
                mine = {option: job.measure[option] for option in ("seed", "bos")}
                run.add(pi.condition(handle, **mine, **less, **same))
                continue
            for option, most in (("context", 256), ("sequences", 16)):
                if job.measure[option] is not None:
                    less[option] = min(job.measure[option], less.get(option, most))
            of_all = {option: job.measure[option] for option in ("layers", "seed", "bos", "capture")}
            run.add(getattr(pi, EXPERIMENTS[name])(handle, text, **of_all, **less, **same))
        if job.sweep is not None:
            run.manifest["sweep"] = dict(job.sweep)
        with progress.stage(f"writing {job.folder}"):
            if job.with_pages:
                run.report(job.folder, overwrite=job.overwrite, pages=job.pages)
            else:
                run.save(job.folder, overwrite=job.overwrite)
    return run
