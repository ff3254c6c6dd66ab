"""What the benchmarks share: models and tokens by name, runs in processes of their own, medians, Markdown tables.

torch is imported by children alone: the kernel begins a child's peak memory at what its parent held.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
REAL = ("smollm2", "gemma3")
NO_ROOM = re.compile(r"allocate memory|failed to map segment")  # said by the loader, or inside another exception
VOCABULARY = 4096  # of models with random weights: their embeddings do not hide the layers

# Widths of real models, with two layers: what measuring costs a layer is what it costs the whole.
WIDE = {
    "llama-3.2-1b-2-layers": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "num_hidden_layers": 2,
    },
    "llama-3.1-8b-2-layers": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336, "num_hidden_layers": 2,
    },
}  # fmt: skip

LONG = {  # SmolLM2-135M's shape, for contexts beyond its 8,192 positions
    "smollm2-135m-shape": {
        "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True,
    },
}  # fmt: skip
SHAPES = WIDE | LONG


def found(model: str) -> str:
    """A real model's file, fetched where it is not there; any other name as it is."""
    if model not in REAL:
        return model
    sys.path.insert(0, str(TESTS))
    from real_models import fetch

    return str(fetch(model))


def load(model: str) -> Any:
    """A handle of a name in REAL or SHAPES, or of anything that pavinterp loads."""
    import pavinterp as pi

    return pi.load(random_llama(**SHAPES[model])) if model in SHAPES else pi.load(found(model))


def random_llama(**shape: Any) -> Any:
    """A Llama with random weights; `shape` goes to its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    usual = {"vocab_size": VOCABULARY, "max_position_embeddings": 2**17, "bos_token_id": 0, "eos_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**{**usual, **shape})).eval()


def tokens(handle: Any, corpus: str, context: int, sequences: int) -> list[Any]:
    """Sequences cut from the corpus's texts laid end to end, over again where more are asked for.

    Random ids where the model has no tokenizer: what is read changes no cost.
    """
    import numpy as np

    import pavinterp as pi

    wanted = context * sequences
    if handle.tokenizer is None:
        ids = np.random.default_rng(0).integers(1, handle.vocabulary_size, wanted)
    else:
        text = "\n\n".join(content for _, content in pi.corpus(corpus).documents)
        ids = np.asarray(handle.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
    return list(np.resize(ids, (sequences, context)))


def stimuli(sequences: list[Any]) -> Any:
    """Ready token sequences as Stimuli, each a document of its own."""
    import numpy as np

    from pavinterp.stimuli import Stimuli, token_hash

    return Stimuli(
        kind="text",
        tokens=sequences,
        document=np.arange(len(sequences)),
        document_names=[str(i) for i in range(len(sequences))],
        source="benchmark",
        bos="never",
        bos_added=False,
        token_hash=token_hash(sequences),
        dropped_tokens=0,
    )


def peak_mb() -> float:
    """Peak resident memory of this process so far (getrusage), MB: interpreter, libraries and weights included."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # bytes there, KB on Linux


def answer(work: Callable[[dict[str, Any]], dict[str, Any]], settings: dict[str, Any]) -> None:
    """In a child: do the work under its memory limit and print what came of it, or how it failed."""
    from pavinterp.exits import is_out_of_memory, one_line

    limit = settings.get("limit_gb")
    try:
        if limit:
            resource.setrlimit(resource.RLIMIT_AS, (int(limit * 2**30),) * 2)
        result = work(settings)
    except Exception as error:  # whatever a competitor raises is its row
        traceback.print_exc()
        if is_out_of_memory(error) or NO_ROOM.search(str(error)):
            how = f"out of memory{f' at {limit:g} GB of address space' if limit else ''}"
        elif isinstance(error, ModuleNotFoundError):
            how = f"not installed ({one_line(error, 100)})"
        else:
            how = f"{type(error).__name__}: {one_line(error, 160)}"
        result = {"failed": how}
    print(json.dumps(result), flush=True)
    os._exit(0)  # a traceback while modules are torn down is no failure of the work


def child(script: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What `answer` printed in a process of its own; {"failed": how} where it printed nothing."""
    command = [sys.executable, script, "--child", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        code, said = done.returncode, done.stderr.strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        why = (
            "memory ran out, most likely" if code == -signal.SIGKILL else said[-1][:120] if said else "it said nothing"
        )
        result = {"failed": f"{how} ({why})"}
    if "failed" in result:
        print(done.stderr[-2000:], file=sys.stderr, flush=True)
    return result


def forked(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The same from a fork, which spares imports: for a parent that has imported torch and computed nothing."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.write(write, json.dumps(work(*arguments)).encode())  # far less than a pipe holds
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(process, 0)
    if not said:
        raise RuntimeError(f"{work.__name__}{arguments} failed")
    return json.loads(said)


def alternate(ways: Sequence[str], rounds: int, run: Callable[[str], dict[str, Any]]) -> dict[str, list[dict]]:
    """Results by way: each round runs all of them, every other round in the reverse order.

    A way that failed is not run again; its last result says how.
    """
    results: dict[str, list[dict]] = {way: [] for way in ways}
    for i in range(rounds):
        for way in ways if i % 2 == 0 else list(reversed(ways)):
            if any("failed" in result for result in results[way]):
                continue
            results[way].append(run(way))
            print(f"round {i + 1} {way}: {results[way][-1]}", file=sys.stderr, flush=True)
    return results


def failure(results: list[dict]) -> str | None:
    """How a way failed; None where it did not."""
    return next((result["failed"] for result in results if "failed" in result), None)


def spread(values: Iterable[float], digits: int) -> str:
    """Median and range."""
    values = list(values)
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def ratio(results: list[dict], bare: list[dict], key: str) -> str:
    """Median and range of the rounds' own ratios."""
    return spread([one[key] / other[key] for one, other in zip(results, bare, strict=True)], 3)


def row(*cells: object) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*cells: str) -> str:
    """Its first two lines."""
    return f"{row(*cells)}\n|{'---|' * len(cells)}"
