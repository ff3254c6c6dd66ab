"""The manifest: model, text, arguments and versions that a run came from, and what its reader must know."""

from __future__ import annotations

import hashlib
import platform
import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pandas as pd

from pavinterp import __version__, plugins
from pavinterp.capture import certificate
from pavinterp.capture.bridge_attention import has_hooks, hooked_points
from pavinterp.capture.gate import GATE
from pavinterp.capture.paths import TRANSFORMER_LENS, few_tokens, forward, hooked_anywhere, path_of
from pavinterp.errors import UserError
from pavinterp.models import ModelHandle, fingerprint, untouched
from pavinterp.norms import Norms
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import LayerInfo, without_attention

DEFAULTS = {"tests": 64, "layers": "all", "batch": "auto", "bos": "auto", "capture": "auto"}  # need not be typed


def describe_run(
    handle: ModelHandle,
    shapes: list[LayerInfo],
    measured: list[LayerInfo],
    norms: Norms,
    stimuli: Stimuli,
    probe: Stimuli,
    records: pd.DataFrame,
    arguments: dict[str, Any],
    command: str | None,
) -> dict[str, Any]:
    """Everything that is needed to make the run again.

    Args:
        handle: the model.
        shapes: every attention layer of the model.
        measured: those measured.
        norms: that attention's writes pass through.
        stimuli: the text.
        probe: the repeated random tokens.
        records: of the run, for notes on what they lack.
        arguments: as they took effect.
        command: the command line, or None for a run made from Python.
    """
    packages = ["torch", "transformers", "numpy", "pandas"]
    if path_of(handle) == TRANSFORMER_LENS:
        packages.append("transformer_lens")
    return {
        "pavinterp_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command or command_of(handle, stimuli, arguments),
        "model": describe_model(handle, shapes),
        "corpus": describe_stimuli(stimuli),
        "probe": describe_stimuli(probe),
        "arguments": arguments,
        "seed": arguments["seed"],
        "tests_per_sequence": arguments["tests"],
        "layers": [asdict(info) for info in measured],
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages}
        | plugins.versions(),
        "notes": notes_on(handle, shapes, norms, stimuli, records),
    }


def describe_model(handle: ModelHandle, shapes: list[LayerInfo]) -> dict[str, Any]:
    """Which model, exactly."""
    return {
        "name": handle.name,
        "source": handle.source,
        "revision": handle.revision,
        "architecture": handle.architecture,
        "parameters": handle.parameters if handle.bridge is None else handle.bridge.n_params_total,
        "dtype": str(handle.dtype).removeprefix("torch."),
        "device": str(handle.device),
        "layers": len(shapes),
        "heads": sum(info.heads for info in shapes),
        "path": path_of(handle),
    }


def describe_stimuli(stimuli: Stimuli) -> dict[str, Any]:
    """Which text, exactly."""
    return {
        "source": stimuli.source,
        "kind": stimuli.kind,
        "token_hash": stimuli.token_hash,
        "documents": len(set(stimuli.document.tolist())),
        "sequences": len(stimuli.tokens),
        "context": max(len(t) for t in stimuli.tokens),
        "tokens": int(sum(len(t) for t in stimuli.tokens)),
        "bos": stimuli.bos,
        "bos_added": stimuli.bos_added,
        "dropped_tokens": stimuli.dropped_tokens,
    }


def command_of(handle: ModelHandle, stimuli: Stimuli, arguments: dict[str, Any]) -> str:
    """The command line that makes a run from Python again, or what must be in memory to make it from Python."""
    given = {name: value for name, value in arguments.items() if DEFAULTS.get(name) != value}
    if handle.words is None or stimuli.words is None:
        model = f"<{handle.architecture} in memory>" if handle.words is None else repr(handle.words[0])
        text = f"<{stimuli.source} in memory>" if stimuli.words is None else repr(stimuli.source)
        if "tests" in given:
            given["tests"] = None if given["tests"] == "all" else given["tests"]
        return f"pi.measure({', '.join([model, text, *(f'{name}={value!r}' for name, value in given.items())])})"
    words = ["pavinterp", "report", *handle.words, *stimuli.words]
    for name, value in given.items():
        words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return shlex.join(words)


def describe_experiment(
    handle: ModelHandle,
    shapes: list[LayerInfo],
    stimuli: Stimuli,
    arguments: dict[str, Any],
    residuals: dict[int, list[float]],
    intervals: str,
    command: str | None,
) -> dict[str, Any]:
    """How the tables of an experiment came about: model, text, arguments, versions, certificate, intervals."""
    return {
        "pavinterp_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "model": describe_model(handle, shapes),
        "corpus": describe_stimuli(stimuli),
        "arguments": arguments,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")}
        | plugins.versions(),
        "certificate": {
            "tolerance": certificate.tolerance(handle.dtype),
            "largest": max(max(row) for row in residuals.values()),
        },
        "intervals": intervals,
    }


def work(
    handle: ModelHandle, shapes: list[LayerInfo], stimuli: Stimuli, what: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    """All that the numbers of a piece of work depend on, by which an interrupted process's finished parts are found.

    Raises:
        UserError: there are hooks on the model: nothing tells whether they are those of the interrupted process.
    """
    hooked = hooked_anywhere(handle.model) if handle.bridge is None else hooked_points(handle.bridge)
    if hooked or handle.witness is not None:
        raise UserError(
            "resume with hooks on the model: what they do cannot be looked up; begin anew (resume=False, --no-resume)"
        )
    live = handle.source in ("live", "bridge")
    weights = fingerprint(handle.model, buffers=live)
    text = hashlib.sha256(stimuli.document.tobytes())
    for ids in stimuli.tokens:
        text.update(ids.tobytes() + b"|")
    return {
        "what": what,
        "model": describe_model(handle, shapes) | {"device": handle.device.type},  # any one of several
        "weights": weights,
        "states": _probe_hash(handle) if live else None,
        "text": text.hexdigest(),
        "arguments": arguments,
        "versions": {name: version(name) for name in ("pavinterp", "torch", "transformers")} | plugins.versions(),
    }


def _probe_hash(handle: ModelHandle) -> str:
    """What a model in memory makes of a few tokens: active adapters and attributes show in it alone."""
    with untouched(handle.model):
        states = forward(handle, few_tokens(handle))
    return hashlib.sha256(states.float().cpu().numpy().tobytes()).hexdigest()


def notes_on(
    handle: ModelHandle, shapes: list[LayerInfo], norms: Norms, stimuli: Stimuli, records: pd.DataFrame
) -> list[str]:
    """What a reader of this run must know beside the definitions."""
    notes = []
    missing = without_attention(handle, shapes)
    if handle.bridge is not None and (hooked := hooked_points(handle.bridge)):
        notes.append(f"The TransformerBridge was measured with the hooks that were on it: {', '.join(hooked)}.")
    if handle.bridge is None and has_hooks(handle.model):
        notes.append(
            f"Hooks on {handle.architecture} itself did not run: attention is measured in the model below the "
            "language-model head."
        )
    if missing:
        notes.append(
            f"Layers {missing} have no attention that could be captured (none, or one that their code computes past "
            f"transformers' registry); they are not in the tables."
        )
    text = records[records["stimuli"] == "text"]
    silent = text.loc[text["effective_load"].isna(), ["layer", "head"]].drop_duplicates()
    if len(silent):
        names = ", ".join(f"L{layer}H{head}" for layer, head in silent.head(8).itertuples(index=False))
        notes.append(
            f"{len(silent)} heads write nothing in some sequences (no US reaches the residual stream, or none that "
            f"float32 tells from zero): {names}."
        )
    if gated := [info.layer for info in shapes if info.between == GATE]:
        notes.append(
            f"Layers {gated} multiply each response with a gate before W_O, which depends on the test alone: a test "
            "finds every US multiplied with its gate, and contributions, loads and fidelities are of those."
        )
    if norms.on_write:
        notes.append(
            "This architecture normalises the attention's output after W_O; inner products are taken before that norm."
        )
    if norms.final is None:
        notes.append("No norm was found between the last layer and the unembedding; promoted tokens are without one.")
    if norms.hooked:
        notes.append(
            f"Forward hooks are on {', '.join(norms.hooked[:8])}{', ...' if len(norms.hooked) > 8 else ''}; what those "
            "change after W_O is in no number here."
        )
    if stimuli.short_documents:
        one = stimuli.short_documents == 1
        notes.append(
            f"{stimuli.short_documents} {'document' if one else 'documents'} of those read {'is' if one else 'are'} "
            f"shorter than one sequence and left out."
        )
    return notes
