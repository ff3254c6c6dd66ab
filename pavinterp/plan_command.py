"""The command `plan`: reads no model; its options, and what it prints."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pavinterp.errors import UserError
from pavinterp.options import Json, ReplaceFile

if TYPE_CHECKING:
    from pavinterp.planner import Plan

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
PRINTED = ("depth", "d_model", "heads", "kv_heads", "d_k", "mlp", "parameters", "eps", "redundancy", "reliability")


def plan(
    parameters: Annotated[
        str, typer.Option("--parameters", metavar="N", help="Budget of the whole model, such as 10M or 1.5B.")
    ],
    associations: Annotated[
        float | None,
        typer.Option(
            "--associations", metavar="N", help="That each head holds; if not given the mean load of the run of --from."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="A folder that report or measure wrote: load of its heads; with the experiments redundancy and "
            "propagate in it also the share of distinct heads, and gains.",
        ),
    ] = None,
    kv_heads: Annotated[
        str | None,
        typer.Option(
            "--kv-heads", metavar="N|all", help="KV heads a layer; if not given groups of 1, 2, 4 and 8 query heads."
        ),
    ] = None,
    hops: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Retrievals in series that are needed, further layers being further tries; if not given each layer "
            "is one, and fewer layers always better.",
        ),
    ] = None,
    combination: Annotated[
        str,
        typer.Option(
            metavar="summed|any",
            help="What heads do with an error: their writes add up, or one head that is right suffices (the paper).",
        ),
    ] = "summed",
    vocabulary: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the designs.")] = 32_000,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Designs to print.")] = 10,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write all designs, one a row.")] = None,
    overwrite: ReplaceFile = False,
    as_json: Json = False,
) -> None:
    """Say what depth, width and heads a parameter budget is best spent on.

    Reliability of retrieval by the capacity theorem, for every design of a Llama-style model that the budget allows:
    the best, and how flat the optimum is. An order of designs, not a forecast of what they recall.
    """
    from pavinterp import terminal
    from pavinterp.output import check_file, write_file

    budget, memories = parse_parameters(parameters), parse_kv_heads(kv_heads)
    file = None if csv is None else check_file(csv, overwrite)

    import pavinterp as pi

    measured = None if run is None else pi.Run.load(os.path.expanduser(run))
    found = pi.plan(
        budget,
        associations,
        measured=measured,
        kv_heads=memories,
        hops=hops,
        combination=combination,  # type: ignore[arg-type]  # checked by plan
        vocabulary=vocabulary,
    )
    if file is not None:
        write_file(file, found.designs.to_csv(index=False))
        print(f"written: {file}", file=sys.stderr)
    if as_json:
        terminal.print_json({**found.manifest, "designs": found.designs, "flat": found.flat})
    else:
        print_plan(found, top)


def print_plan(found: Plan, top: int) -> None:
    """The best designs and how flat the optimum is; what was measured and what assumed goes to stderr."""
    from pavinterp.terminal import number

    width = {name: max(len(name) + 2, 8) for name in PRINTED} | {"parameters": 15}
    print("".join(f"{name:>{width[name]}}" for name in PRINTED))
    for row in found.designs.head(top).to_dict("records"):
        row["parameters"] = f"{row['parameters']:,}"
        print("".join(f"{number(row[name]):>{width[name]}}" for name in PRINTED))
    for line in flat_lines(found):
        print(line)
    tried, best = found.manifest["arguments"]["depth"], int(found.optimum["depth"])
    if best == max(tried) > 1:
        print(f"The best is as deep as was tried ({best} layers): the optimum may lie beyond.", file=sys.stderr)
    arguments = found.manifest["arguments"]
    how = "heads' writes add up" if arguments["combination"] == "summed" else "one head that is right suffices"
    series = "each layer one retrieval" if arguments["hops"] is None else f"{arguments['hops']} retrievals"
    print(
        f"{len(found.designs)} designs of {arguments['parameters']:,} parameters; {series} in series; {how}. "
        f"{sentence(found.manifest)}",
        file=sys.stderr,
    )
    print(
        "eps: share of one head's response that is crosstalk, in a linear memory; redundancy: heads of a layer that "
        "fail independently; reliability: chance that all retrievals in series succeed. Softmax heads retrieve better: "
        "take the order, not the value.",
        file=sys.stderr,
    )


def flat_lines(found: Plan) -> list[str]:
    """How many designs lie within 1 % and 5 % of the optimum, and between what."""
    lines = []
    for row in found.flat.reset_index().to_dict("records"):
        spans = [
            f"{name} {low}" if low == high else f"{name} {low} to {high}"
            for name in ("depth", "heads", "kv_heads", "d_k")
            for low, high in [(int(row[f"{name}_min"]), int(row[f"{name}_max"]))]
        ]
        count = int(row["designs"])
        lines.append(
            f"within {100 * row['within']:.0f} % of the best: {count} design{'s' if count > 1 else ''} "
            f"({', '.join(spans)})"
        )
    return lines


def sentence(manifest: dict[str, Any]) -> str:
    """One line: what was measured and what is assumed."""
    return f"measured: {'; '.join(manifest['measured']) or 'nothing'}. assumed: {'; '.join(manifest['assumed'])}."


def parse_parameters(text: str) -> int:
    """`10M` is 10,000,000; K, M and B are thousands, millions and thousand millions.

    Raises:
        UserError: anything else.
    """
    match = re.fullmatch(
        r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMB]?)", text.strip().replace(",", ""), re.ASCII | re.IGNORECASE
    )
    budget = 0 if match is None else round(float(match[1]) * _FACTORS[match[2].upper()])
    if not 1000 <= budget <= 10**15:
        raise UserError(f"--parameters {text:.30}: give a number from 1000 on, such as 500K, 10M or 1.5B")
    return budget


def parse_kv_heads(text: str | None) -> int | str | None:
    """`4` is 4, `all` stays.

    Raises:
        UserError: anything else.
    """
    if text is None or text == "all":
        return text
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or int(text) < 1:
        raise UserError(f"--kv-heads {text:.20}: give a whole number of at least 1, or all")
    return int(text)
