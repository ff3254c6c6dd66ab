"""The command `condition`: its options, and what it prints. It reads no text of the user's, so it stands by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pavinterp.command_steps import is_given, load_model, quiet_libraries
from pavinterp.options import (
    Batch,
    Bos,
    Device,
    Dtype,
    Json,
    Model,
    Quiet,
    ReplaceFile,
    Resume,
    Revision,
    Seed,
    Tokenizer,
    Trust,
    parse_batch,
    parse_names,
)

FEW_DRAWS = 40
FEW_PARADIGMS = "acquisition,extinction,latent_inhibition,overshadowing,blocking,second_order,generalisation"
"""What `--fast` takes for options that are not given."""


def condition(
    ctx: typer.Context,
    model: Model,
    paradigms: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Names of built-in ones (a wrong name lists them) and .toml files, commas between; all if not given.",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=2, metavar="N", help="Random draws of stimuli, of each paradigm.")] = 200,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Of arrow (A -> X,), colon (A: X;), sentence (A X.), line (A X, one a line); all if not given.",
        ),
    ] = None,
    stimuli: Annotated[
        str,
        typer.Option(
            metavar="words|random|nonsense|FILE",
            help="Single tokens of the model's vocabulary: words, any tokens, letters without a vowel; or a text file "
            "with one a line.",
        ),
    ] = "words",
    margin: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Effects within it count as none; if not given 0.2, or 5 % of the effect of acquisition over all "
            "layouts if that is more.",
        ),
    ] = None,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads/--no-heads", help="Ask which heads carry it, and do it again without them, in up to 48 draws."
        ),
    ] = True,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a contrast and layout, all columns.")
    ] = None,
    overwrite: ReplaceFile = False,
    batch: Batch = "auto",
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="A first look: 40 draws of acquisition, extinction, latent inhibition, overshadowing, blocking, "
            "second order and generalisation; --draws and --paradigms count where they are given.",
        ),
    ] = False,
    resume: Resume = True,
    bos: Bos = "auto",
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    revision: Revision = None,
    tokenizer: Tokenizer = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run Pavlov's experiments on a model, in context.

    Paradigms of classical conditioning as prompts of trials, each with its control group, in several layouts, over many
    random draws of stimuli; what theories of conditioning predict of them, fitted to acquisition only (without it
    they keep rates of their own), and whether that is what the model does. Minutes for a small model, half an hour to
    an hour on a CPU for one like SmolLM2 with --fast.
    """
    from pavinterp import terminal
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    file = None if csv is None else check_file(csv, overwrite)
    if fast:
        draws = draws if is_given(ctx, "draws") else FEW_DRAWS
        paradigms = paradigms or FEW_PARADIGMS
    number_a_pass = parse_batch(batch)

    import pavinterp as pi
    from pavinterp.experiments.carriers import CARRIER_FRAMES
    from pavinterp.experiments.conditioning import FRAMES, chosen_layouts, chosen_paradigms

    names = parse_names(layouts)
    chosen_layouts(names)
    listed = parse_names(paradigms)
    chosen = None if listed is None else chosen_paradigms(listed)
    quiet_libraries()
    with progress_to(quiet=quiet) as progress:
        handle = load_model(ctx.params, progress)
        found = pi.condition(
            handle, paradigms=chosen, draws=draws, layouts=names, stimuli=stimuli, margin=margin, heads=heads,
            batch=number_a_pass, seed=seed, bos=bos, resume=resume, progress=progress, command=ctx.obj["command"],
        )  # fmt: skip
    if file is not None:
        write_file(file, found.effects.to_csv())
        if not quiet:
            print(f"written: {file}", file=sys.stderr)
    if as_json:
        frames = {name: getattr(found, name) for name in FRAMES}
        frames |= {name: getattr(found.carriers, name) for name in ("heads", *CARRIER_FRAMES)} if heads else {}
        terminal.print_json({**found.manifest, **frames})
    else:
        terminal.print_conditioning(found)
