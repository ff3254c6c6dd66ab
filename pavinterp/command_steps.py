"""Steps that commands share: quieting libraries, reading the text, loading the model, as the options say."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from pavinterp.corpora import Corpus
    from pavinterp.models import ModelHandle
    from pavinterp.progress import Progress


def load_model(options: Mapping[str, Any], progress: Progress) -> ModelHandle:
    """The model that a command's options (`typer.Context.params`) name.

    Raises:
        UserError: there is no such model, or it cannot be measured.
    """
    import pavinterp as pi

    names = ("revision", "dtype", "device", "trust_remote_code", "tokenizer")
    with progress.stage(f"loading {options['model']}"):
        return pi.load(options["model"], **{name: options[name] for name in names})


def read_text(options: Mapping[str, Any], progress: Progress) -> Corpus:
    """The text that a command's options name; read before the model, for it is quicker to find fault with.

    Raises:
        UserError: there is no such text, or nothing in it can be read.
    """
    import pavinterp as pi

    with progress.stage(f"reading {options['corpus']}"):
        names = ("text_field", "max_documents")
        return pi.corpus(options["corpus"], **{name: options[name] for name in names})


def is_given(ctx: typer.Context, name: str) -> bool:
    """Whether the command line has the option, rather than its default standing in."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def quiet_libraries() -> None:
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
