"""The files of a local model folder: what must be there, and the hash that names its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pavinterp.adapters import adapter_beside
from pavinterp.errors import UserError

# in transformers' order of preference
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
SIZES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_labels")
MOST = 10_000  # of each


def check_folder(folder: Path) -> None:
    """Raise UserError where a folder cannot be a model's, saying what is missing."""
    if not (folder / "config.json").is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if ggufs:
            raise UserError(f"{folder} holds GGUF files and no config.json: give the file itself, {ggufs[0]}")
        if (folder / "adapter_config.json").is_file():
            raise UserError(f"{folder} is an adapter, not a model: merge it into its base model and save that")
        raise UserError(f"no config.json in {folder}: give a folder written by save_pretrained, or a .gguf file")
    _check_sizes(folder / "config.json")
    if (folder / "adapter_config.json").is_file():  # transformers would load it, or not, as PEFT is installed or not
        raise UserError(adapter_beside(str(folder)))
    if not weight_files(folder):
        raise UserError(
            f"no weights in {folder}: expected {WEIGHTS[0]} or {WEIGHTS[2]}, whole or in shards with an index"
        )


def _check_sizes(path: Path) -> None:
    """Raise UserError where a configuration asks for more layers or labels than a model has; building it never ends."""
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # transformers says what is wrong with it
    parts = [part for part in (config, *config.values()) if isinstance(part, dict)] if isinstance(config, dict) else []
    for part in parts:
        for name in SIZES:
            if isinstance(part.get(name), int) and part[name] > MOST:
                raise UserError(f"{path}: {name} is {part[name]:,}, more than any model has: correct it")


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers takes the weights from; empty where there are none.

    Raises:
        UserError: the index of a sharded checkpoint cannot be read, or names a file that is not in the folder.
    """
    first = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if first is None or first.suffix != ".json":
        return [first] if first else []
    try:
        names = {Path(name) for name in json.loads(first.read_text("utf-8"))["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{first} is not an index of weights: download it again") from error
    outside = next((name for name in sorted(names) if name.is_absolute() or ".." in name.parts), None)
    if outside is not None:
        raise UserError(f"{first} names {outside}, which lies outside its folder: it is not read")
    shards = sorted(folder / name for name in names)
    for shard in shards:
        if not shard.is_file():
            raise UserError(f"{first} names {shard.name}, which is not there: download it too")
    return shards


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_hash(folder: Path) -> str:
    """SHA-256 of the weight file; of several, that of the lines `sha256sum` prints for them in order of name."""
    paths = weight_files(folder)
    if len(paths) == 1:
        return file_hash(paths[0])
    lines = "".join(f"{file_hash(path)}  {path.name}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()
