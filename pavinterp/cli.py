"""The `pavinterp` command: parse, call the API, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pavinterp import __version__
from pavinterp.errors import UserError
from pavinterp.options import (
    Batch,
    Bos,
    Capture,
    Context,
    CorpusOption,
    Device,
    Dtype,
    FewSequences,
    Json,
    Layers,
    MaxDocuments,
    Model,
    Out,
    Overwrite,
    Pages,
    Quiet,
    Revision,
    Seed,
    Sequences,
    ShortContext,
    Tests,
    TextField,
    Tokenizer,
    Trust,
    With,
    check_pages,
    name_of,
    parse_layers,
    parse_names,
    parse_tests,
)


class Group(TyperGroup):
    """The commands, ended by one line and an exit code whatever happens in them."""

    def invoke(self, ctx: Any) -> Any:
        from pavinterp import exits

        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a reader that went away is noticed here and not at exit
            return result
        except BaseException as error:
            if isinstance(error, (SystemExit, typer.Exit, typer.Abort)) or _is_usage_error(error):
                raise
            raise typer.Exit(exits.end(error)) from error


app = typer.Typer(
    cls=Group,
    name="pavinterp",
    help="How many associations does each attention head of a transformer hold, "
    "against the capacity of an associative memory of its width?",
    epilog="pavinterp report: measures the embedded model, needs no network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: half the time to answer, and it reads the same in a pipe
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


EXPERIMENTS = {
    "rules": "explain",
    "capacity": "memory_capacity",
    "needed": "needed_associations",
    "swap": "linearisation_cost",
    "budget": "association_budget",
}
"""Commands that `report --with` takes, and the function of each."""


def _measuring(with_pages: bool) -> Callable[..., None]:
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
        batch: Batch = None,
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
        from pavinterp.output import check_folder
        from pavinterp.progress import progress_to

        number_of_tests, chosen_layers, paged = parse_tests(tests), parse_layers(layers), parse_layers(pages, "--pages")
        where = os.path.join("reports", name_of(model)) if out is None else out
        experiments = parse_names(others) or []
        if wrong := [name for name in experiments if name not in EXPERIMENTS]:
            raise UserError(f"--with {','.join(wrong)}: choose among {', '.join(EXPERIMENTS)}")
        check_folder(where, overwrite)  # before the work, not after it
        folder = Path(os.path.expanduser(where))
        if paged is not None and not with_pages:
            raise UserError("--pages: measure writes no pages; use report, or leave it out")

        import pavinterp as pi
        from pavinterp import terminal

        _quiet_libraries()
        with progress_to(quiet=quiet) as progress:
            with progress.stage(f"reading {corpus}"):  # first: quicker to find fault with than a model
                text = pi.corpus(corpus, text_field=text_field, max_documents=max_documents)
            with progress.stage(f"loading {model}"):
                handle = pi.load(
                    model,
                    revision=revision,
                    dtype=dtype,
                    device=device,
                    trust_remote_code=trust_remote_code,
                    tokenizer=tokenizer,
                )
            check_pages(paged, chosen_layers, handle.model.config)
            run = pi.measure(
                handle,
                text,
                context=context,
                sequences=sequences,
                tests=number_of_tests,
                layers=chosen_layers,
                seed=seed,
                batch=batch,
                bos=bos,
                capture=capture,
                examples=with_pages,
                progress=progress,
                command=ctx.obj["command"],
            )
            for name in experiments:
                run.add(
                    getattr(pi, EXPERIMENTS[name])(
                        handle,
                        text,
                        context=None if context is None else min(context, 256),
                        sequences=None if sequences is None else min(sequences, 16),
                        layers=chosen_layers,
                        seed=seed,
                        bos=bos,
                        capture=capture,
                        progress=progress,
                        command=ctx.obj["command"],
                    )
                )
            with progress.stage(f"writing {folder}"):
                if with_pages:
                    run.report(folder, overwrite=overwrite, pages=paged)
                else:
                    run.save(folder, overwrite=overwrite)
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


app.command("report", help="Measure a model, write a report to read in a browser.")(_measuring(True))
app.command("measure", help="Measure a model, write its tables only.")(_measuring(False))


@app.command()
def heads(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that report or measure wrote.")],
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help="Largest first.")] = None,
    top: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N only.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help='All columns, as JSON; missing numbers are null, endless ones "inf".')
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="All columns, as CSV.")] = False,
) -> None:
    """Print the table of heads of a run."""
    from pavinterp import store, terminal

    if as_json and as_csv:
        raise UserError("--json and --csv: choose one of them")
    run = Path(os.path.expanduser(run))
    table = terminal.sorted_heads(store.read_heads(run), sort, top)
    if as_csv:
        table.to_csv(sys.stdout)
    elif as_json:
        terminal.print_json({"run": run.absolute(), "model": store.read_manifest(run)["model"], "heads": table})
    else:
        terminal.print_heads(table, also=sort)


@app.command()
def rules(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sequences to read; if not given 32, or all of the text if less."),
    ] = None,
    bos: Bos = "auto",
    tests: Tests = "32",
    layers: Layers = None,
    names: Annotated[
        str | None, typer.Option("--rules", metavar="LIST", help="Rules, such as covariance,delta; all if not given.")
    ] = None,
    by: Annotated[str, typer.Option(metavar="head|layer", help="What a line of the printed table is.")] = "head",
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head and rule, all columns.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    batch: Batch = None,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say which learning rule explains each head of a model.

    R^2 of the head's response beyond the mean of what it sees, one gain a head and rule, fitted on one half of the text
    and judged on the other; how much is linear at all, and which of the linear memories comes closest. Seconds a layer
    for a small model, minutes a layer for one like SmolLM2 with the default text; fewer --rules are quicker.
    """
    from pavinterp.arguments import require_one_of
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    number_of_tests, chosen_layers, chosen_rules = parse_tests(tests), parse_layers(layers), parse_names(names)
    require_one_of("--by", by, ("head", "layer"))
    file = None if csv is None else check_file(csv, overwrite)

    import pavinterp as pi
    from pavinterp import terminal
    from pavinterp.experiments.rules import choose_rules

    choose_rules(chosen_rules)
    _quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        with progress.stage(f"reading {corpus}"):
            text = pi.corpus(corpus, text_field=text_field, max_documents=max_documents)
        with progress.stage(f"loading {model}"):
            handle = pi.load(
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
            )
        found = pi.explain(
            handle,
            text,
            context=context,
            sequences=sequences,
            tests=number_of_tests,
            layers=chosen_layers,
            rules=chosen_rules,
            seed=seed,
            batch=batch,
            bos=bos,
            capture=capture,
            progress=progress,
            command=ctx.obj["command"],
        )
    if file is not None:
        write_file(file, found.flat().to_csv())
    if as_json:
        terminal.print_json({**found.manifest, "heads": found.heads, "rules": found.rules})
    else:
        terminal.print_explanation(found, by)


@app.command()
def capacity(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sequences to read; if not given 16, or all of the text if less."),
    ] = None,
    bos: Bos = "auto",
    layers: Layers = None,
    names: Annotated[
        str | None, typer.Option("--rules", metavar="LIST", help="Rules, such as hebbian,softmax; all if not given.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Measure the same architecture with random weights too.")
    ] = True,
    fast: Annotated[
        bool, typer.Option("--fast", help="A first look: 8 sequences, and hebbian and softmax unless --rules says.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head and memory, all columns.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    batch: Batch = None,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count how many of its own associations a memory of each head holds.

    Memories of 1, 2, 3, ... of the head's own pairs, by each learning rule and by its softmax, probed with stored CSs
    and with the head's own test stimuli; beside the theorem, isotropic CSs and the same architecture with random
    weights.
    """
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    chosen_layers, chosen_rules = parse_layers(layers), parse_names(names)
    file = None if csv is None else check_file(csv, overwrite)
    if fast:
        sequences = 8 if sequences is None else sequences
        chosen_rules = ["hebbian", "softmax"] if chosen_rules is None else chosen_rules

    import pavinterp as pi
    from pavinterp import terminal
    from pavinterp.experiments.rules import choose_rules

    choose_rules(chosen_rules)
    _quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        with progress.stage(f"reading {corpus}"):
            text = pi.corpus(corpus, text_field=text_field, max_documents=max_documents)
        with progress.stage(f"loading {model}"):
            handle = pi.load(
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
            )
        found = pi.memory_capacity(
            handle,
            text,
            context=context,
            sequences=sequences,
            layers=chosen_layers,
            rules=chosen_rules,
            control=control,
            seed=seed,
            batch=batch,
            bos=bos,
            capture=capture,
            progress=progress,
            command=ctx.obj["command"],
        )
    if file is not None:
        write_file(file, found.memories.to_csv())
    if as_json:
        terminal.print_json(
            {**found.manifest, "heads": found.heads, "memories": found.memories, "curves": found.curves}
        )
    else:
        terminal.print_capacity(found)


@app.command()
def needed(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    layers: Layers = None,
    number_of_heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, metavar="N", help="So many of the heads, drawn at random; all if not given."),
    ] = None,
    renormalise: Annotated[
        bool, typer.Option("--renormalise", help="Scale the strengths that are kept to the sum that all had.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head, all columns.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Count the associations of each head that the model's predictions rest on.

    One head at a time, each response is cut down to its strongest associations; printed beside the effective load, with
    the rank correlation of the two and of the load's rivals. About twenty forward passes a head and sequence.
    """
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    chosen_layers = parse_layers(layers)
    file = None if csv is None else check_file(csv, overwrite)

    import pavinterp as pi
    from pavinterp import terminal

    _quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        with progress.stage(f"reading {corpus}"):
            text = pi.corpus(corpus, text_field=text_field, max_documents=max_documents)
        with progress.stage(f"loading {model}"):
            handle = pi.load(
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
            )
        found = pi.needed_associations(
            handle,
            text,
            context=context,
            sequences=sequences,
            layers=chosen_layers,
            heads=number_of_heads,
            renormalise=renormalise,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
            command=ctx.obj["command"],
        )
    if file is not None:
        write_file(file, found.heads.to_csv())
    if as_json:
        terminal.print_json({**found.manifest, "heads": found.heads, "correlations": found.correlations})
    else:
        terminal.print_needed(found)


@app.command()
def swap(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    layers: Layers = None,
    names: Annotated[
        str | None,
        typer.Option(
            "--rules", metavar="LIST", help="Rules, such as covariance,oja; covariance, decay and delta if not given."
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head, all columns.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a model loses where a head becomes a linear memory.

    Each head's response is replaced by that of a learning rule, one gain a head and rule, fitted on one half of the
    text and used on the other: rise of the next-token loss by head, by layer, and for all heads; the loss as more and
    more heads are swapped, the cheapest first; and whether the effective load tells the cost.
    """
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    chosen_layers, chosen_rules = parse_layers(layers), parse_names(names)
    file = None if csv is None else check_file(csv, overwrite)

    import pavinterp as pi
    from pavinterp import terminal
    from pavinterp.experiments.rules import choose_rules

    choose_rules(chosen_rules)
    _quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        with progress.stage(f"reading {corpus}"):
            text = pi.corpus(corpus, text_field=text_field, max_documents=max_documents)
        with progress.stage(f"loading {model}"):
            handle = pi.load(
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
            )
        found = pi.linearisation_cost(
            handle,
            text,
            context=context,
            sequences=sequences,
            layers=chosen_layers,
            rules=chosen_rules,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
            command=ctx.obj["command"],
        )
    if file is not None:
        write_file(file, found.heads.to_csv())
    if as_json:
        tables = ("heads", "layers", "total", "correlations", "curve")
        terminal.print_json({**found.manifest, **{name: getattr(found, name) for name in tables}})
    else:
        terminal.print_swap(found)


@app.command()
def budget(
    ctx: typer.Context,
    model: Model,
    max_loss_increase: Annotated[
        float, typer.Option("--max-loss-increase", metavar="NATS", help="Of the next token's loss, nats per token.")
    ] = 0.01,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=8, metavar="N", help="Tokens a sequence; if not given 256, or the model's positions if fewer."
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Sequences to read; if not given 16, or all of the text if less."),
    ] = None,
    bos: Bos = "auto",
    layers: Layers = None,
    by: Annotated[
        str,
        typer.Option(metavar="both|curves|load", help="How budgets are chosen; load alone is quicker by far."),
    ] = "both",
    renormalise: Annotated[
        bool, typer.Option("--renormalise", help="Scale the strengths that are kept to the sum that all had.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head, all columns.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace that file.")] = False,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find how few associations each head can keep for a given loss.

    Budgets are chosen on one half of the text with all heads cut at once, and judged on the other, against the same
    number for every head and against the last positions alone. They bound what sparse attention must read, and the KV
    cache from below.
    """
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    chosen_layers = parse_layers(layers)
    file = None if csv is None else check_file(csv, overwrite)

    import pavinterp as pi
    from pavinterp import terminal

    _quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        with progress.stage(f"reading {corpus}"):
            text = pi.corpus(corpus, text_field=text_field, max_documents=max_documents)
        with progress.stage(f"loading {model}"):
            handle = pi.load(
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
            )
        found = pi.association_budget(
            handle,
            text,
            context=context,
            sequences=sequences,
            layers=chosen_layers,
            max_loss_increase=max_loss_increase,
            renormalise=renormalise,
            by=by,
            seed=seed,
            bos=bos,
            capture=capture,
            progress=progress,
            command=ctx.obj["command"],
        )
    if file is not None:
        write_file(file, found.heads.to_csv())
    if as_json:
        terminal.print_json({**found.manifest, "heads": found.heads, "methods": found.methods, "curve": found.curve})
    else:
        terminal.print_budget(found)


@app.command()
def verify(
    model: Model,
    layers: Layers = None,
    capture: Capture = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say whether and how exactly a model can be measured.

    Prints by which path its attention is captured, the certificate of every layer, and whether the other path, other
    batches and later tokens agree. Exit 0 where all of it holds, 3 where the model runs but is not measured exactly.
    """
    from pavinterp.progress import progress_to

    chosen_layers = parse_layers(layers)
    import pavinterp as pi
    from pavinterp import terminal
    from pavinterp.verification import verify as verify_model

    _quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        with progress.stage(f"loading {model}"):
            handle = pi.load(
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
                tokenizer=tokenizer,
            )
        with progress.stage("verifying"):
            result = verify_model(handle, layers=chosen_layers, capture=capture)
    if as_json:
        terminal.print_json(result)
    else:
        terminal.print_verification(result)
    if not result["passed"]:
        raise typer.Exit(3)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 the user's to change, 3 not exact (verify)."""
    with suppress(ValueError):  # not in the main thread, which alone may handle signals
        signal.signal(signal.SIGTERM, _terminated)
    arguments = sys.argv[1:] if arguments is None else arguments
    typed = {"command": shlex.join(["pavinterp", *arguments])}  # the manifest says how to make a run again
    try:
        code = app(arguments, prog_name="pavinterp", standalone_mode=False, obj=typed)
    except Exception as error:
        if not _is_usage_error(error):
            raise
        code = _print_usage_error(error)
    sys.exit(code if isinstance(code, int) else 0)


def _terminated(number: int, frame: object) -> None:
    """End by way of an exception, so that unfinished folders are removed."""
    raise SystemExit(128 + number)


def _is_usage_error(error: BaseException) -> bool:
    """Whether the command line itself was wrong (typer's own copy of click and click proper say so alike)."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def _print_usage_error(error: Any) -> int:
    """One line as for every other mistake, with the way to the help."""
    context = error.ctx
    command = context.command_path if context is not None else "pavinterp"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(context.get_help())
        return 0
    message = " ".join(error.format_message().split())
    print(f"pavinterp: {message.rstrip('.')}: see {command} --help", file=sys.stderr)
    return int(error.exit_code)


def _quiet_libraries() -> None:
    """Leave the terminal to our own lines and warnings; PAVINTERP_DEBUG=1 lets the libraries talk."""
    if os.environ.get("PAVINTERP_DEBUG") == "1":
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    package = Path(__file__).parent

    def show(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
        if package in Path(filename).parents:
            print(f"pavinterp: note: {message}", file=sys.stderr)

    warnings.showwarning = show
