"""The options that commands share, and how the values of those that need more than typer are read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from pavinterp.errors import UserError

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="demo (the embedded model), a Hugging Face id, a folder, or a .gguf file."),
]
CorpusOption = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="demo, a .txt, .jsonl or .parquet file, a folder of .txt, - (standard input), hf:NAME[/CONFIG][:SPLIT].",
    ),
]
TextField = Annotated[
    str, typer.Option(metavar="NAME", help="Field or column with the text, in .jsonl, .parquet and hf: datasets.")
]
MaxDocuments = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Read the first N documents only; all if not given.")
]
Context = Annotated[
    int | None,
    typer.Option(min=8, metavar="N", help="Tokens a sequence; if not given 1,024, or the model's positions if fewer."),
]
ShortContext = Annotated[
    int | None,
    typer.Option(min=8, metavar="N", help="Tokens a sequence; if not given 256, or the model's positions if fewer."),
]
FewSequences = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Sequences to read; if not given 16, or all of the text if less."),
]
Sequences = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Sequences to measure; if not given 64, or all of the text if less."),
]
Bos = Annotated[
    str,
    typer.Option(
        metavar="auto|always|never", help="Begin sequences with the BOS token; auto does what the tokenizer does."
    ),
]
Tests = Annotated[str, typer.Option(metavar="N|all", help="Positions of each sequence that are tested.")]
Layers = Annotated[
    str | None, typer.Option(metavar="LIST", help="Layers to measure, such as 0,3,5-8; all if not given.")
]
Pages = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Layers whose heads get a page of their own (report only); all if not given."),
]
With = Annotated[
    str | None,
    typer.Option(
        "--with",
        metavar="LIST",
        help="Experiments to make too and show beside the loads, such as rules,capacity,needed,swap,budget; each on at "
        "most 16 sequences of 256 tokens, which takes minutes for a small model and hours for a large one.",
    ),
]
Batch = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Sequences a forward pass; auto: about 4,096 tokens, on a GPU as many as fit up to 65,536. What does not "
        "fit into memory is halved until it does.",
    ),
]
Capture = Annotated[
    str,
    typer.Option(
        metavar="auto|attention_interface|transformer_lens",
        help="How attention is captured; auto takes what the model needs (transformers' registry, a TransformerBridge, "
        "or hooks on its modules), transformer_lens is a second witness of the same numbers.",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16, float16 or float64.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Of all sampling.")]
Revision = Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a Hugging Face model.")]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="MODEL", help="Id or folder of a tokenizer, instead of the model's own.")
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let the model's repository run its own Python code here.")
]
Out = Annotated[str | None, typer.Option(metavar="FOLDER", help="Where to write; reports/NAME if not given.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in that folder.")]
CsvOfHeads = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write one row a head, all columns.")]
ReplaceFile = Annotated[bool, typer.Option("--overwrite", help="Replace that file.")]
Renormalise = Annotated[
    bool, typer.Option("--renormalise", help="Scale the strengths that are kept to the sum that all had.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume", help="Go on where the same command was interrupted; finished parts are in the cache."
    ),
]
Parts = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Where finished parts are kept, and those of shards are taken from."),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="i/N",
        help="Measure the i-th of N shares only and leave it in --parts; the same command without --shard then puts "
        "them together.",
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        help="Where it runs: in this process, or on the workers of a Ray cluster (that of RAY_ADDRESS, or this "
        "machine's cores), which must see the same files.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Of Ray: one a GPU, or one a machine, if not given.")
]
Shares = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Of each model, for Ray; four a worker if not given.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def parse_names(text: str | None) -> list[str] | None:
    """`delta,decay` is ["delta", "decay"]; None stays None."""
    return None if text is None else [name.strip() for name in text.split(",")]


def parse_strengths(text: str) -> list[float]:
    """`0.01,0.1` is [0.01, 0.1].

    Raises:
        UserError: a part is no positive number.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < strength < float("inf") for strength in found):
        raise UserError(f"--strengths {text:.40}: give numbers above 0, such as 0.01,0.1,1")
    return found


def parse_tests(text: str) -> int | None:
    """`64` is 64 tests a sequence, `all` is None: every position.

    Raises:
        UserError: neither a positive whole number nor `all`.
    """
    return _count_or("all", "--tests", text)


def parse_batch(text: str) -> int | None:
    """`8` is 8 sequences a forward pass, `auto` is None.

    Raises:
        UserError: neither a positive whole number nor `auto`.
    """
    return _count_or("auto", "--batch", text)


def _count_or(word: str, option: str, text: str) -> int | None:
    if text == word:
        return None
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < 1:
        raise UserError(f"{option} {text:.20}: give a whole number of at least 1, or {word}")
    return int(text)


def parse_layers(text: str | None, option: str = "--layers") -> list[int] | None:
    """`0,3,5-8` is [0, 3, 5, 6, 7, 8], increasing and each once; None is all layers.

    Raises:
        UserError: anything else.
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part, re.ASCII)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"{option} {text}: give layer numbers from 0 and ranges, such as 0,3,5-8")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


def parse_shard(text: str | None, parts: str | None) -> tuple[int, int] | None:
    """`2/8` is (2, 8); None stays None.

    Raises:
        UserError: anything else, a share that is none of so many, or nowhere to leave it.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text, re.ASCII)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {text:.20}: give i/N, i from 1 to N, such as 2/8")
    if parts is None:
        raise UserError("--shard leaves its share in a folder that the others see too: give --parts FOLDER")
    return int(match[1]), int(match[2])


def check_pages(pages: list[int] | None, layers: list[int] | None, config: Any) -> None:
    """Before hours of work: UserError where `pages` names layers that are not going to be measured."""
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    known = set(layers) if layers is not None else None if depth is None else set(range(depth))
    if known is not None and (wrong := sorted(set(pages or ()) - known)):
        raise UserError(f"--pages {','.join(map(str, wrong))}: not among the layers that are measured (--layers)")


def name_of(model: str) -> str:
    """A folder name for a model: `meta-llama/Llama-3.2-1B` and `~/Llama-3.2-1B.gguf` are both `llama-3.2-1b`."""
    path = Path(os.path.expanduser(model))
    name = path.resolve().name if os.path.exists(path) else re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    name = re.sub(r"\.gguf$", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:100] or "model"
