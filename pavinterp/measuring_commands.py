"""The commands that measure: `report` and `measure` one model, `sweep` many; their options, and what they print."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pavinterp.command_steps import quiet_libraries
from pavinterp.errors import UserError
from pavinterp.experiment_commands import EXPERIMENTS
from pavinterp.options import (
    Batch,
    Bos,
    Capture,
    Context,
    CorpusOption,
    Device,
    Dtype,
    Engine,
    Json,
    Layers,
    MaxDocuments,
    Model,
    Out,
    Overwrite,
    Pages,
    Parts,
    Quiet,
    Resume,
    Revision,
    Seed,
    Sequences,
    Shard,
    Shares,
    Tests,
    TextField,
    Tokenizer,
    Trust,
    With,
    Workers,
    name_of,
    parse_batch,
    parse_layers,
    parse_names,
    parse_shard,
    parse_tests,
)

if TYPE_CHECKING:
    from pavinterp.jobs import Job
    from pavinterp.progress import Progress
    from pavinterp.run import Run

FirstLooks = Annotated[bool, typer.Option("--fast", help="Experiments of --with as first looks only.")]


def measuring(with_pages: bool) -> Callable[..., None]:
    """The function behind `report` (with pages) and `measure` (tables only): the same options, the same steps."""

    def command(
        ctx: typer.Context,
        model: Model = "demo",
        corpus: CorpusOption = "demo",
        text_field: TextField = "text",
        max_documents: MaxDocuments = None,
        context: Context = None,
        sequences: Sequences = None,
        bos: Bos = "auto",
        tests: Tests = "64",
        layers: Layers = None,
        pages: Pages = None,
        others: With = None,
        fast: FirstLooks = False,
        batch: Batch = "auto",
        resume: Resume = True,
        parts: Parts = None,
        shard: Shard = None,
        engine: Engine = "local",
        workers: Workers = None,
        shards: Shares = None,
        capture: Capture = "auto",
        device: Device = "auto",
        dtype: Dtype = "float32",
        seed: Seed = 0,
        revision: Revision = None,
        tokenizer: Tokenizer = None,
        trust_remote_code: Trust = False,
        out: Out = None,
        overwrite: Overwrite = False,
        as_json: Json = False,
        quiet: Quiet = False,
    ) -> None:
        folder = Path(os.path.expanduser(os.path.join("reports", name_of(model)) if out is None else out))
        job = _job(ctx, folder, with_pages)
        share = parse_shard(shard, parts)
        _check_engine(engine, workers, shards, shard)
        if share is None:
            from pavinterp.output import check_folder

            check_folder(folder if out is None else out, overwrite)  # before the work, not after it
        if pages is not None and not with_pages:
            raise UserError("--pages: measure writes no pages; use report, or leave it out")

        from pavinterp import jobs, terminal
        from pavinterp.progress import progress_to

        quiet_libraries()
        with progress_to(quiet=quiet) as progress:
            if share is not None:
                done = jobs.share(job, share, progress, jobs.Loaded())
                print(f"shard {shard}: {done} batches are in {parts}; without --shard the same command takes them up")
                return
            if engine == "ray":
                run = _on_ray(job, progress, workers, shards)
            else:
                run = jobs.perform(job, progress, jobs.Loaded())
        page = folder / "index.html" if with_pages else None
        try:
            if as_json:
                terminal.print_json({"folder": folder.absolute(), "page": page and page.absolute(), **run.manifest})
            else:
                print(*terminal.run_lines(run.manifest, run.heads()), page or folder, sep="\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            why = error.strerror or error
            raise UserError(f"the run is whole in {folder}, but its summary cannot be printed here ({why})") from error

    return command


def sweep(
    ctx: typer.Context,
    models: Annotated[
        Path,
        typer.Argument(metavar="MODELS", help="A file with a model a line, --revision NAME behind it if wanted."),
    ],
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: Context = None,
    sequences: Sequences = None,
    bos: Bos = "auto",
    tests: Tests = "64",
    layers: Layers = None,
    pages: Pages = None,
    no_pages: Annotated[bool, typer.Option("--no-pages", help="Tables only, as measure writes them.")] = False,
    others: With = None,
    fast: FirstLooks = False,
    batch: Batch = "auto",
    engine: Engine = "local",
    workers: Workers = None,
    shards: Shares = None,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where to write, a folder a model.")] = "reports/sweep",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure all again, replace the runs there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure many models on one text, a folder each.

    One that fails does not stop the rest. The same command again measures those that are missing. Exit 0 where all are
    there, 2 where one is not.
    """
    from pavinterp.many import jobs_of, measure_many, read_models

    folder = Path(os.path.expanduser(out))
    if not out:
        raise UserError("--out has an empty name: give a folder such as reports/sweep")
    _check_engine(engine, workers, shards, None)
    if pages is not None and no_pages:
        raise UserError("--pages and --no-pages: choose one of them")
    jobs = jobs_of(read_models(Path(os.path.expanduser(models))), _job(ctx, folder, not no_pages))

    from pavinterp import terminal
    from pavinterp.progress import progress_to

    quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        table = measure_many(jobs, folder, progress, engine=engine, workers=workers, shards=shards, overwrite=overwrite)
    if as_json:
        terminal.print_json({"folder": folder.absolute(), "models": table})
    else:
        terminal.print_models(table)
        print(folder / "models.csv")
    if failed := int((table["status"] == "failed").sum()):
        raise UserError(
            f"{failed} of {len(table)} models failed; when what is said of each is mended, the same command goes on"
        )


def _job(ctx: typer.Context, folder: Path, with_pages: bool) -> Job:
    """What the options of a command ask for; those of a sweep are like every model's."""
    from pavinterp.jobs import OF_MODEL, OF_TEXT, Job

    options = ctx.params
    experiments = parse_names(options["others"]) or []
    if wrong := [name for name in experiments if name not in EXPERIMENTS]:
        raise UserError(f"--with {','.join(wrong)}: choose among {', '.join(EXPERIMENTS)}")
    parts = options.get("parts")
    if parts == "":
        raise UserError("--parts has an empty name: give a folder")
    return Job(
        options={name: options.get(name) for name in (*OF_MODEL, *OF_TEXT)},
        measure={
            **{name: options[name] for name in ("context", "sequences", "seed", "bos", "capture")},
            "batch": parse_batch(options["batch"]),
            "tests": parse_tests(options["tests"]),
            "layers": parse_layers(options["layers"]),
        },
        folder=folder,
        overwrite=options["overwrite"],
        with_pages=with_pages,
        pages=parse_layers(options["pages"], "--pages"),
        experiments=experiments,
        fast=options["fast"],
        resume=options.get("resume", True),
        parts=None if parts is None else Path(os.path.expanduser(parts)),
        command=ctx.obj["command"],
    )


def _check_engine(engine: str, workers: int | None, shards: int | None, shard: str | None) -> None:
    """UserError where the options on engines contradict one another."""
    if engine not in ("local", "ray"):
        raise UserError(f"--engine {engine:.20}: choose local or ray")
    if engine == "local" and (workers or shards):
        raise UserError("--workers and --shards are of --engine ray: give it too, or leave them out")
    if engine == "ray" and shard is not None:
        raise UserError("--shard with --engine ray: Ray makes the shares itself; leave one of them out")


def _on_ray(job: Job, progress: Progress, workers: int | None, shards: int | None) -> Run:
    """The run of one job that workers of a cluster did."""
    from pavinterp.pieces import digest
    from pavinterp.ray_engine import on_ray
    from pavinterp.run import Run

    parts = job.parts
    if parts is None:  # beside the run, on a disk that the workers see too
        asked = digest({"options": dict(job.options), "measure": dict(job.measure)})
        parts = job.folder.absolute().with_name(f".{job.folder.name}.parts-{asked}")
    for _, wrong in on_ray([replace(job, parts=parts)], progress, workers=workers, shards=shards):
        if wrong is not None:
            raise UserError(wrong)
    with suppress(OSError):
        parts.rmdir()
    return Run.load(job.folder)
