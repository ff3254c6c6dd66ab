"""The `pavinterp` command: parse, call the API, print. Nothing heavy is imported before a command runs.

The commands of single experiments are in `experiment_commands`.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pavinterp import __version__
from pavinterp.command_steps import load_model, quiet_libraries
from pavinterp.errors import UserError
from pavinterp.experiment_commands import COMMANDS
from pavinterp.measuring_commands import measuring, sweep
from pavinterp.options import (
    Capture,
    Device,
    Dtype,
    Json,
    Layers,
    Model,
    Quiet,
    Revision,
    Tokenizer,
    Trust,
    parse_layers,
    parse_names,
)
from pavinterp.plan_command import plan


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


app.command("report", help="Measure a model, write a report to read in a browser.")(measuring(True))
app.command("measure", help="Measure a model, write its tables only.")(measuring(False))
app.command()(sweep)


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
def figures(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that report or measure wrote.")],
    form: Annotated[str, typer.Option("--format", metavar="pdf|svg|png|eps", help="Of the files.")] = "pdf",
    width: Annotated[
        str, typer.Option(metavar="LENGTH", help="Of the figures: 3.25in, 8.3cm or 234pt, as your column is.")
    ] = "3.25in",
    only: Annotated[
        str | None, typer.Option(metavar="LIST", help="Names of pictures, commas between; all if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write; if not given, RUN-figures.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files of the same names.")] = False,
) -> None:
    """Write the pictures of a run for a paper: at the width of a column, fonts embedded."""
    from pavinterp.figures import inches, write_figures
    from pavinterp.run import Run

    length, run = inches(width), Path(os.path.expanduser(run))
    folder = run.absolute().with_name(f"{run.absolute().name}-figures") if out is None else out.expanduser()
    for path in write_figures(
        Run.load(run), folder, only=parse_names(only), format=form, width=length, overwrite=overwrite
    ):
        print(path)


for experiment in COMMANDS:
    app.command()(experiment)

app.command()(plan)


@app.command()
def verify(
    ctx: typer.Context,
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
    from pavinterp import terminal
    from pavinterp.verification import verify as verify_model

    quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        handle = load_model(ctx.params, progress)
        with progress.stage("verifying"):
            result = verify_model(handle, layers=chosen_layers, capture=capture)
    if as_json:
        terminal.print_json(result)
    else:
        terminal.print_verification(result)
    if not result["passed"]:
        raise typer.Exit(3)


@app.command()
def doctor(
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Ask the Hugging Face hub for an answer.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Look this installation over.

    Versions, devices, cache, hub, what other packages add, and what pip would have to install for what is missing. Exit
    0 where all that is needed works, 2 where something does not.
    """
    from pavinterp.doctor import doctor as examine
    from pavinterp.doctor import lines

    quiet_libraries()
    found = examine(network=network)
    if as_json:
        from pavinterp import terminal

        terminal.print_json(found)
    else:
        print(*lines(found), sep="\n")
    if not found["healthy"]:
        raise typer.Exit(2)


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
    """End by way of an exception, so that unfinished folders are removed and what is finished is kept."""
    from pavinterp.exits import Terminated

    raise Terminated


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
