"""The commands of single experiments: their options, and what they print.

Each declares its options in its signature; those that all of them have are read from the context by `_found`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pavinterp.command_steps import is_given, load_model, quiet_libraries, read_text
from pavinterp.condition_command import FEW_DRAWS, FEW_PARADIGMS, condition
from pavinterp.options import (
    Batch,
    Bos,
    Capture,
    CorpusOption,
    CsvOfHeads,
    Device,
    Dtype,
    FewSequences,
    Json,
    Layers,
    MaxDocuments,
    Model,
    Quiet,
    Renormalise,
    ReplaceFile,
    Resume,
    Revision,
    Seed,
    ShortContext,
    Tests,
    TextField,
    Tokenizer,
    Trust,
    parse_batch,
    parse_layers,
    parse_names,
    parse_strengths,
    parse_tests,
)

if TYPE_CHECKING:
    from pavinterp.models import ModelHandle

EXPERIMENTS = {
    "rules": "explain",
    "capacity": "memory_capacity",
    "needed": "needed_associations",
    "swap": "linearisation_cost",
    "budget": "association_budget",
    "propagate": "error_propagation",
    "redundancy": "head_redundancy",
    "prune": "head_importance",
    "condition": "condition",
}
"""Commands that `report --with` takes, and the function of each; `condition` writes its own text."""

RULE_NAMES = "covariance,decay,delta,feature_map,gated_delta,hebbian,oja,pseudoinverse,softmax"
"""Keys of `pavinterp.theory.rules.RULES`, for the help, which imports nothing heavy."""

FIRST_LOOK: dict[str, dict[str, Any]] = {
    "rules": {"context": 128, "sequences": 8, "rules": ["covariance", "delta"]},
    "capacity": {"context": 128, "sequences": 8, "rules": ["hebbian", "softmax"], "control": False},
    "needed": {"context": 128, "sequences": 8, "heads": 16},
    "swap": {"context": 128, "sequences": 8, "rules": ["covariance"]},
    "budget": {"context": 128, "sequences": 16, "by": "load"},
    "propagate": {"context": 64, "sequences": 8, "draws": 1, "strengths": [0.03, 0.1, 0.3]},
    "redundancy": {"context": 128, "sequences": 8, "pairs": 8, "ablated_layers": 3},
    "prune": {"context": 64, "sequences": 8},
    "condition": {"draws": FEW_DRAWS, "paradigms": FEW_PARADIGMS.split(",")},
}
"""What `--fast` takes for options that are not given; 8 sequences are the fewest that give intervals (of each half)."""


def _found(
    ctx: typer.Context, table: Callable[[Any], Any], *, check: Callable[[], Any] = lambda: None, **own: Any
) -> Any:
    """What the experiment of a command found; its table is written where `--csv` says.

    Args:
        ctx: of the command; options that all experiments have are taken from it.
        table: of what was found, the frame for `--csv`.
        check: raises UserError where an option of this experiment makes no sense, before text or model is read.
        own: arguments that this experiment alone has, or takes otherwise than from the context.
    """
    from pavinterp.output import check_file, write_file
    from pavinterp.progress import progress_to

    options, command = ctx.params, str(ctx.info_name)
    arguments = {name: options[name] for name in ("context", "sequences", "seed", "bos", "capture", "resume")}
    arguments["layers"] = parse_layers(options["layers"])
    if "rules" in options:
        arguments["rules"] = parse_names(options["rules"])
    arguments |= own
    file = None if options["csv"] is None else check_file(options["csv"], options["overwrite"])

    import pavinterp as pi
    from pavinterp.experiments.rules import choose_rules

    check()
    choose_rules(arguments.get("rules"))
    quiet_libraries()
    with progress_to(quiet=options["quiet"]) as progress:
        text, handle = read_text(options, progress), load_model(options, progress)
        if options["fast"]:
            quick = first_look(command, handle)
            arguments |= {name: value for name, value in quick.items() if not is_given(ctx, name)}
        experiment = getattr(pi, EXPERIMENTS[command])
        found = experiment(handle, text, **arguments, progress=progress, command=ctx.obj["command"])
    if file is not None:
        write_file(file, table(found).to_csv())
        if not options["quiet"]:
            print(f"written: {file}", file=sys.stderr)
    return found


def first_look(command: str, handle: ModelHandle) -> dict[str, Any]:
    """What an experiment takes for a first look at a model, which may have fewer positions."""
    quick = dict(FIRST_LOOK[command])
    if "context" in quick:
        quick["context"] = min(quick["context"], handle.max_context or quick["context"])
    return quick


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
    rules: Annotated[str | None, typer.Option(metavar="LIST", help=f"Of {RULE_NAMES}; all if not given.")] = None,
    by: Annotated[str, typer.Option(metavar="head|layer", help="What a line of the printed table is.")] = "head",
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head and rule, all columns.")
    ] = None,
    overwrite: ReplaceFile = False,
    batch: Batch = "auto",
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="A first look: 8 sequences of 128 tokens, covariance and delta; what is given counts."
        ),
    ] = False,
    resume: Resume = True,
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
    """Say which learning rule explains each head.

    R^2 of the head's response beyond the mean of what it sees, one gain a head and rule, fitted on one half of the text
    and judged on the other; how much is linear at all, and which of the linear memories comes closest. Seconds a layer
    for a small model, minutes a layer for one like SmolLM2 with the default text; fewer --rules are quicker.
    """
    from pavinterp import terminal
    from pavinterp.arguments import require_one_of

    require_one_of("--by", by, ("head", "layer"))
    found = _found(ctx, lambda found: found.flat(), tests=parse_tests(tests), batch=parse_batch(batch))
    if as_json:
        terminal.print_json({**found.manifest, "heads": found.heads, "rules": found.rules})
    else:
        terminal.print_explanation(found, by)


def capacity(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    layers: Layers = None,
    rules: Annotated[str | None, typer.Option(metavar="LIST", help=f"Of {RULE_NAMES}; all if not given.")] = None,
    control: Annotated[
        bool, typer.Option("--control/--no-control", help="Measure the same architecture with random weights too.")
    ] = True,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head and memory, all columns.")
    ] = None,
    overwrite: ReplaceFile = False,
    batch: Batch = "auto",
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="A first look: 8 sequences of 128 tokens, hebbian and softmax, no control; what is given counts.",
        ),
    ] = False,
    resume: Resume = True,
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
    """Count what a memory of each head holds.

    Memories of 1, 2, 3, ... of the head's own pairs, by each learning rule and by its softmax, probed with stored CSs
    and with the head's own test stimuli; beside the theorem, isotropic CSs and the same architecture with random
    weights.
    """
    from pavinterp import terminal

    found = _found(ctx, lambda found: found.memories, control=control, batch=parse_batch(batch))
    if as_json:
        terminal.print_json(
            {**found.manifest, "heads": found.heads, "memories": found.memories, "curves": found.curves}
        )
    else:
        terminal.print_capacity(found)


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
    heads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="So many of the heads, drawn at random; all if not given.")
    ] = None,
    renormalise: Renormalise = False,
    csv: CsvOfHeads = None,
    overwrite: ReplaceFile = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="A first look: 16 heads, 8 sequences of 128 tokens; what is given counts.")
    ] = False,
    resume: Resume = True,
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
    """Count what predictions rest on, by head.

    One head at a time, each response is cut down to its strongest associations; printed beside the effective load, with
    the rank correlation of the two and of the load's rivals. About twenty forward passes a head and sequence.
    """
    from pavinterp import terminal

    found = _found(ctx, lambda found: found.heads, heads=heads, renormalise=renormalise)
    if as_json:
        terminal.print_json({**found.manifest, "heads": found.heads, "correlations": found.correlations})
    else:
        terminal.print_needed(found)


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
    rules: Annotated[
        str | None,
        typer.Option(metavar="LIST", help=f"Of {RULE_NAMES}; covariance,decay,delta if not given."),
    ] = None,
    csv: CsvOfHeads = None,
    overwrite: ReplaceFile = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="A first look: 8 sequences of 128 tokens, covariance; what is given counts.")
    ] = False,
    resume: Resume = True,
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
    """Say what a linear memory for a head costs.

    Each head's response is replaced by that of a learning rule, one gain a head and rule, fitted on one half of the
    text and used on the other: rise of the next-token loss by head, by layer, and for all heads; the loss as more and
    more heads are swapped, the cheapest first; and whether the effective load tells the cost.
    """
    from pavinterp import terminal

    found = _found(ctx, lambda found: found.heads)
    if as_json:
        tables = ("heads", "layers", "total", "correlations", "curve")
        terminal.print_json({**found.manifest, **{name: getattr(found, name) for name in tables}})
    else:
        terminal.print_swap(found)


def budget(
    ctx: typer.Context,
    model: Model,
    max_loss_increase: Annotated[
        float, typer.Option("--max-loss-increase", metavar="NATS", help="Of the next token's loss, nats per token.")
    ] = 0.01,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    layers: Layers = None,
    by: Annotated[
        str,
        typer.Option(metavar="both|curves|load", help="How budgets are chosen; load alone is quicker by far."),
    ] = "both",
    renormalise: Renormalise = False,
    csv: CsvOfHeads = None,
    overwrite: ReplaceFile = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="A first look: 16 sequences of 128 tokens, --by load; what is given counts.")
    ] = False,
    resume: Resume = True,
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
    """Find how few associations heads can keep.

    Budgets are chosen on one half of the text with all heads cut at once, and judged on the other, against the same
    number for every head and against the last positions alone. They bound what sparse attention must read, and the KV
    cache from below.
    """
    from pavinterp import terminal

    def check() -> None:
        from pavinterp.experiments.budgets import check_choices

        check_choices(by, max_loss_increase)

    own = {"max_loss_increase": max_loss_increase, "renormalise": renormalise, "by": by}
    found = _found(ctx, lambda found: found.heads, check=check, **own)
    if as_json:
        terminal.print_json({**found.manifest, "heads": found.heads, "methods": found.methods, "curve": found.curve})
    else:
        terminal.print_budget(found)


def propagate(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    layers: Layers = None,
    strengths: Annotated[
        str,
        typer.Option(metavar="LIST", help="Norms of what is injected, over that of what the layer's attention writes."),
    ] = "0.01,0.03,0.1,0.3,1",
    draws: Annotated[int, typer.Option(min=1, metavar="N", help="Perturbations a sequence, layer and kind.")] = 2,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write the gains: a row a kind, strength, layer and block."),
    ] = None,
    overwrite: ReplaceFile = False,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="A first look: 8 sequences of 64 tokens, one draw, 3 strengths; what is given counts."
        ),
    ] = False,
    resume: Resume = True,
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
    """Follow retrieval errors through depth.

    Each head's retrieval error beside what its load predicts; then perturbations drawn from each layer's own
    interference, and isotropic ones of equal norm: what they become after every later block and at the logits, how far
    that is linear, and whether errors of all layers at once add up independently.
    """
    from pavinterp import terminal

    found = _found(ctx, lambda found: found.gain, strengths=parse_strengths(strengths), draws=draws)
    if as_json:
        tables = ("heads", "calibration", "layers", "gain", "ends", "linearity", "witness", "joint")
        terminal.print_json({**found.manifest, **{name: getattr(found, name) for name in tables}})
    else:
        terminal.print_propagation(found)


def redundancy(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    tests: Tests = "64",
    layers: Layers = None,
    cut: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, metavar="CKA", help="Heads are one cluster down to this; best silhouette if not given."
        ),
    ] = None,
    pairs: Annotated[int, typer.Option(min=0, metavar="N", help="Pairs of heads ablated in each layer.")] = 12,
    ablated_layers: Annotated[
        int | None,
        typer.Option(
            "--ablated-layers", min=0, metavar="N", help="Ablate in so many layers, evenly spread; all if not given."
        ),
    ] = None,
    csv: CsvOfHeads = None,
    overwrite: ReplaceFile = False,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="A first look: 8 sequences of 128 tokens, 8 pairs a layer in 3 layers; what is given counts.",
        ),
    ] = False,
    resume: Resume = True,
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
    """Say which heads of a layer do the same work.

    How alike heads are by what they write to the residual stream, and how many distinct ones a layer has; then heads
    are ablated one by one, in pairs, in clusters and in random groups: do heads that are alike stand in for each other?
    About sixty passes from the head's layer on for each layer and sequence, for nine heads a layer.
    """
    from pavinterp import terminal

    found = _found(
        ctx,
        lambda found: found.heads,
        tests=parse_tests(tests),
        cut=cut,
        pairs=pairs,
        ablated_layers=ablated_layers,
    )
    if as_json:
        tables = ("heads", "layers", "total", "pairs", "groups", "control", "correlations")
        terminal.print_json({**found.manifest, **{name: getattr(found, name) for name in tables}})
    else:
        terminal.print_redundancy(found)


def prune(
    ctx: typer.Context,
    model: Model,
    corpus: CorpusOption = "demo",
    text_field: TextField = "text",
    max_documents: MaxDocuments = None,
    context: ShortContext = None,
    sequences: FewSequences = None,
    bos: Bos = "auto",
    layers: Layers = None,
    csv: CsvOfHeads = None,
    overwrite: ReplaceFile = False,
    fast: Annotated[
        bool,
        typer.Option("--fast", help="A first look: 8 sequences of 64 tokens; what is given counts."),
    ] = False,
    resume: Resume = True,
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
    """Say which heads a model can do without, predicted and measured.

    Heads are ranked on one half of the text without any ablation, and by rivals; on the other half they are replaced by
    their mean response, one by one and in each order, from none to all. About one pass a head and sequence, and a
    hundred or two a sequence for the orders.
    """
    from pavinterp import terminal

    found = _found(ctx, lambda found: found.heads)
    if as_json:
        terminal.print_json(
            {**found.manifest, **{name: getattr(found, name) for name in ("heads", "predictors", "curve")}}
        )
    else:
        terminal.print_prune(found)


COMMANDS = (rules, capacity, needed, swap, budget, propagate, redundancy, prune, condition)
