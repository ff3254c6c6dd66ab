"""Many models in one call, each to a folder of its own; one that fails does not stop the rest."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pavinterp import store
from pavinterp.errors import UserError
from pavinterp.exits import ending
from pavinterp.jobs import OF_TEXT, Job, Loaded, perform
from pavinterp.options import name_of
from pavinterp.output import check_folder, is_run, write_file
from pavinterp.pieces import differences
from pavinterp.progress import Progress

SWEEP = "sweep.json"  # arguments of the sweep whose runs a folder holds
PARTS = ".parts"  # folder of what is finished of runs that are not


def read_models(path: Path) -> list[dict[str, Any]]:
    """Models named by a file: one a line, as a command takes it, `--revision NAME` behind it; # begins a comment.

    Returns:
        for each, {"model": ..., "revision": ... or None}.

    Raises:
        UserError: the file cannot be read, names none, or a line is none of a model.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the list of models cannot be read ({error}): one model a line") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{path} line {number}: {error}") from error
        if not words:
            continue
        if len(words) not in (1, 3) or (len(words) == 3 and words[1] != "--revision"):
            raise UserError(f"{path} line {number}: give MODEL, or MODEL --revision NAME, not {line:.60}")
        found.append({"model": words[0], "revision": words[2] if len(words) == 3 else None})
    if not found:
        raise UserError(f"{path} names no model: one a line")
    return found


def jobs_of(models: Sequence[dict[str, Any]], like: Job) -> list[Job]:
    """A job for each model, in a folder named after it inside that of `like`, from which it has all else.

    Raises:
        UserError: two of them would have one folder.
    """
    jobs: list[Job] = []
    for model in models:
        name = name_of(model["model"]) + (f"-{name_of(model['revision'])}" if model["revision"] else "")
        folder = like.folder / name
        if any(job.folder == folder for job in jobs):
            raise UserError(f"two models would be written to {folder}: name each once")
        options = {**like.options, **model}
        jobs.append(replace(like, options=options, folder=folder, parts=like.folder / PARTS / name))
    return jobs


def measure_many(
    jobs: Sequence[Job],
    folder: Path,
    progress: Progress,
    *,
    engine: str = "local",
    workers: int | None = None,
    shards: int | None = None,
    overwrite: bool = False,
) -> pd.DataFrame:
    """Do the jobs of a sweep; those that an earlier call with the same arguments has finished are there already.

    Args:
        jobs: of `jobs_of`.
        folder: of the sweep, which holds theirs.
        progress: told how far they are.
        engine: "local" (this process, one after another) or "ray" (see `on_ray`).
        workers, shards: as for `on_ray`.
        overwrite: measure all of them again, whatever is there.

    Returns:
        one row a model: status ("measured", "there already", "failed") and why; how many heads, and of which regime.

    Raises:
        UserError: the folder holds runs with other arguments, or cannot be written.
    """
    same = _claim(jobs[0], folder, overwrite)
    finished = [job for job in jobs if same and is_run(job.folder)]
    todo = [job for job in jobs if job not in finished]
    for job in todo:
        check_folder(job.folder, overwrite)
    status: dict[Path, tuple[str, str | None]] = {job.folder: ("there already", None) for job in finished}
    if engine == "ray":
        from pavinterp.ray_engine import on_ray

        outcomes = on_ray(todo, progress, workers=workers, shards=shards) if todo else iter(())
    else:
        outcomes = _here(todo, progress)
    for job, wrong in outcomes:
        status[job.folder] = ("measured", None) if wrong is None else ("failed", wrong)
    for parts in (*(folder / PARTS).glob("*"), folder / PARTS):
        with suppress(OSError):  # that of a model that failed holds what it had finished
            parts.rmdir()
    table = pd.DataFrame([_row(job, *status[job.folder]) for job in jobs])
    write_file(folder / "models.csv", table.to_csv(index=False))
    return table


def _here(jobs: Sequence[Job], progress: Progress) -> Iterator[tuple[Job, str | None]]:
    """Jobs one after another in this process."""
    loaded = Loaded()
    for job in jobs:
        wrong = None
        try:
            perform(job, progress, loaded)
        except Exception as error:
            wrong = ending(error)[0]
        yield job, wrong


def _claim(job: Job, folder: Path, overwrite: bool) -> bool:
    """Write down the sweep's arguments where its runs go; whether they stood there before, so that its runs are these.

    Raises:
        UserError: runs with other arguments are there, or the folder cannot be written.
    """
    own = {**{name: job.options[name] for name in (*OF_TEXT, "dtype", "tokenizer")}, **job.measure}
    own |= {"pages": job.pages, "with_pages": job.with_pages, "with": list(job.experiments), "fast": job.fast}
    path = folder / SWEEP
    try:
        folder.mkdir(parents=True, exist_ok=True)
        was_there = path.exists() and not overwrite
        if was_there and (differ := differences(json.loads(path.read_text("utf-8")), own)):
            raise UserError(
                f"{folder} holds a sweep with other arguments ({differ}): give the same, another --out, or --overwrite"
            )
        write_file(path, json.dumps(own, indent=2, sort_keys=True) + "\n")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {folder}: {error}: choose another folder") from error
    return was_there


def _row(job: Job, status: str, wrong: str | None) -> dict[str, Any]:
    row = {"model": job.options["model"], "revision": job.options["revision"], "status": status}
    if status == "failed":
        return row | {"why": wrong}
    manifest, heads = store.read_manifest(job.folder), store.read_heads(job.folder)
    counts = heads["regime"].value_counts()
    return row | {
        "folder": job.folder.name,
        "layers": len(manifest["layers"]),
        "heads": len(heads),
        "sequences": manifest["corpus"]["sequences"],
        "context": manifest["corpus"]["context"],
        "certificate": manifest["certificate"]["largest"],
        **{regime.replace("-", "_"): counts.get(regime, 0) for regime in ("error-free", "graded", "beyond")},
    }
