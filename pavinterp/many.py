"""Many models in one call, each to a folder of its own; one that fails does not stop the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from pavinterp import store
from pavinterp.cache import alone
from pavinterp.errors import UserError
from pavinterp.exits import ending, one_line
from pavinterp.jobs import OF_TEXT, Job, Loaded, is_done, perform
from pavinterp.options import name_of
from pavinterp.output import check_folder, is_run, write_file
from pavinterp.pieces import differences, digest
from pavinterp.progress import Progress

PARTS = ".parts"  # folder of what is finished of runs that are not


def read_models(path: Path) -> list[dict[str, Any]]:
    """Models named by a file: one a line, as a command takes it, `--revision NAME` behind it; # begins a comment.

    Returns:
        for each, {"model": ..., "revision": ... or None}.

    Raises:
        UserError: the file cannot be read, names none, or a line is none of a model.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the list of models cannot be read ({error}): one model a line") from error
    found = []
    for number, line in enumerate(lines, 1):
        # no shell quoting: backslashes are those of paths
        said = re.sub(r"(^|\s)#.*", "", line).strip()
        if not said:
            continue
        match = re.fullmatch(r"""(["']?)(.+?)\1(?:\s+--revision\s+(\S+))?""", said)
        if not match or match[2][0] in "-\"'" or " --" in match[2]:
            raise UserError(f"{path} line {number}: give MODEL, or MODEL --revision NAME, not {line:.60}")
        found.append({"model": match[2], "revision": match[3]})
    if not found:
        raise UserError(f"{path} names no model: one a line")
    return found


def jobs_of(models: Sequence[dict[str, Any]], like: Job) -> list[Job]:
    """A job for each model, in a folder named after it inside that of `like`, from which it has all else.

    Raises:
        UserError: two of them would have one folder.
    """
    jobs: list[Job] = []
    own = {**{name: like.options[name] for name in (*OF_TEXT, "dtype", "tokenizer")}, **like.measure}
    own |= {"pages": like.pages, "with_pages": like.with_pages, "with": list(like.experiments), "fast": like.fast}
    for model in models:
        name = name_of(model["model"]) + (f"-{name_of(model['revision'])}" if model["revision"] else "")
        folder = like.folder / name
        if any(job.folder == folder for job in jobs):
            raise UserError(f"two models would be written to {folder}: name each once")
        parts = like.folder / PARTS / f"{name}-{digest(own | model)}"
        jobs.append(replace(like, options={**like.options, **model}, folder=folder, parts=parts, sweep=own))
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
    table = folder / "models.csv"
    with alone(folder):
        standing = [job for job in jobs if not overwrite and _stands(job)]
        _make(folder, table)
        status: dict[Path, tuple[str, str | None]] = {}
        loaded = Loaded()
        loaded.text(jobs[0], progress)  # that of all of them: what is wrong with it is said once
        for job in standing:
            status[job.folder] = _looked_at(job, progress, loaded)
        todo = [job for job in jobs if job not in standing]
        for job in todo:
            check_folder(job.folder, overwrite)
        if engine == "ray":
            from pavinterp.ray_engine import on_ray

            outcomes = on_ray(todo, progress, workers=workers, shards=shards) if todo else iter(())
        else:
            outcomes = _here(todo, progress, loaded)
        for job, wrong in outcomes:
            status[job.folder] = ("measured", None) if wrong is None else ("failed", wrong)
        for parts in (*(folder / PARTS).glob("*"), folder / PARTS):
            with suppress(OSError):  # that of a model that failed holds what it had finished
                parts.rmdir()
        found = pd.DataFrame([_row(job, *status[job.folder]) for job in jobs])
        write_file(table, found.to_csv(index=False))
    return found


def _stands(job: Job) -> bool:
    """Whether a run of this sweep is in the job's folder.

    Raises:
        UserError: one with other arguments is, or one that no sweep made.
    """
    if not is_run(job.folder):
        return False
    there = store.read_manifest(job.folder).get("sweep")
    if not isinstance(there, dict):
        check_folder(job.folder)  # which says what is there
    elif differ := differences(there, dict(job.sweep or {})):
        raise UserError(
            f"{job.folder} is of a sweep with other arguments ({differ}): give the same, another --out, or --overwrite"
        )
    return True


def _looked_at(job: Job, progress: Progress, loaded: Loaded) -> tuple[str, str | None]:
    """Whether the run that stands there is of the model and text as they are now."""
    try:
        if is_done(job, progress, loaded):
            return "there already", None
    except Exception as error:
        return "failed", ending(error)[0]
    return "failed", f"{job.folder} is of other weights, text or versions: --overwrite measures them again"


def _make(folder: Path, table: Path) -> None:
    """The folder of a sweep; UserError where it cannot be, or where somebody's own file stands in the table's place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if table.exists() and not table.read_text(encoding="utf-8").startswith("model,revision,status"):
            raise UserError(f"{table} was not written by a sweep and is not replaced: choose another --out")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {folder}: {one_line(error, 120)}: choose another folder") from error


def _here(jobs: Sequence[Job], progress: Progress, loaded: Loaded) -> Iterator[tuple[Job, str | None]]:
    """Jobs one after another in this process."""
    for job in jobs:
        wrong = None
        try:
            perform(job, progress, loaded)
        except Exception as error:
            wrong = ending(error)[0]
        yield job, wrong


def _row(job: Job, status: str, wrong: str | None) -> dict[str, Any]:
    row = {"model": job.options["model"], "revision": job.options["revision"], "status": status}
    if status == "failed":
        return row | {"why": wrong}
    manifest, heads = store.read_manifest(job.folder), store.read_heads(job.folder)
    return row | {
        "folder": job.folder.name,
        "layers": len(manifest["layers"]),
        "heads": len(heads),
        "sequences": manifest["corpus"]["sequences"],
        "context": manifest["corpus"]["context"],
        "certificate": manifest["certificate"]["largest"],
        "regimes": ", ".join(f"{count} {name}" for name, count in heads["regime"].value_counts().items()),
    }
