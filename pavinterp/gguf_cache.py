"""GGUF files: dequantised once and kept as an ordinary model folder in the user's cache."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pavinterp.cache import cache_root
from pavinterp.errors import UserError
from pavinterp.exits import is_out_of_memory, one_line
from pavinterp.model_checks import check_decoder, check_loaded
from pavinterp.model_folder import file_hash

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def dequantised_folder(path: Path) -> tuple[Path, str]:
    """A GGUF model as an ordinary folder (float32 safetensors, configuration, tokenizer), and the file's SHA-256.

    Dequantising runs in Python and takes from half a minute to minutes, so it is done once for each content and
    transformers version (a later version may dequantise differently). float32 keeps every dequantised value exactly.
    The folder is written beside and renamed, so that a killed run leaves nothing that could be taken for a model.

    Raises:
        UserError: the file is not a readable GGUF model, or the cache cannot be written.
    """
    import transformers
    from filelock import FileLock
    from safetensors import SafetensorError

    _check_magic(path)
    digest = file_hash(path)
    folder = cache_root() / "gguf" / f"{digest}-transformers-{transformers.__version__}"
    if folder.is_dir():
        return folder, digest
    beside = folder.with_name(f"{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # two runs on one file: the second waits and finds the first one's folder
            if not folder.is_dir():
                shutil.rmtree(beside, ignore_errors=True)  # left by a killed run
                try:
                    beside.mkdir()
                    _dequantise(path, beside)
                    beside.rename(folder)
                finally:
                    shutil.rmtree(beside, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors tells a full disk by its own exception
        raise UserError(
            f"cannot keep the dequantised {path.name} in {folder.parent} ({one_line(error, 150)}): free space there "
            "(4 bytes a parameter), or set PAVINTERP_CACHE to a folder that can be written"
        ) from error
    return folder, digest


def _check_magic(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        found = "is empty" if not magic else "does not start as a GGUF file does"
        raise UserError(f"{path} {found}: download it again, or give another file")


def _unreadable(path: Path, error: Exception) -> str:
    reason = one_line(error, 200)
    if isinstance(error, NotImplementedError) or ("architecture" in reason and "not supported" in reason):
        return f"{path}: {reason.rstrip('.')}: give the model's Hugging Face id or folder instead"
    if isinstance(error, ImportError):
        return f"{path} needs a package that is not installed: {reason}"
    return f"{path} is corrupt, cut short or not a whole model ({reason or type(error).__name__}): download it again"


def _check_header(path: Path) -> None:
    """Raise UserError for what transformers' loader would pass over in silence."""
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, tensors = read_gguf_metadata(str(path))
    if metadata.get("split.count", 1) > 1:
        raise UserError(
            f"{path} is one part of a file that was split: merge its parts first (llama-gguf-split --merge)"
        )
    architecture = metadata["general.architecture"]
    scaled = metadata.get(f"{architecture}.rope.scaling.type", "none") != "none"
    if architecture != "gpt-oss" and (scaled or any(name.startswith("rope_") for name in tensors)):
        raise UserError(
            f"{path} scales its rotary positions, which transformers does not read from GGUF: "
            "give the model's Hugging Face id or folder instead"
        )


def _check_complete(path: Path, model: PreTrainedModel) -> None:
    """Raise UserError where the model has no place for some of the file's numbers (biases, say)."""
    sizes = _tensor_sizes(path)
    if model.config.get_text_config().tie_word_embeddings:
        sizes.pop("output.weight", None)  # some converters write the tied matrix twice
    spare = sum(sizes.values()) - sum(parameter.numel() for parameter in model.parameters())
    if spare > 0:
        raise UserError(
            f"{path} holds {spare:,} numbers that transformers' {type(model).__name__} leaves out, so that it would "
            "not be the same model: give its Hugging Face id or folder instead"
        )


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Number of elements of each tensor in a GGUF file."""
    from transformers.integrations.gguf import GgufHeader

    try:
        return {tensor.name: math.prod(tensor.shape) for tensor in GgufHeader.from_file(str(path)).tensors}
    except (
        ValueError
    ):  # a kind of block that this reader does not know; the next one does, and takes 20 s over a vocabulary
        from gguf import GGUFReader

        return {tensor.name: int(tensor.n_elements) for tensor in GGUFReader(path).tensors}


def _dequantise(path: Path, folder: Path) -> None:
    """Write `path` as an ordinary model folder; the tokenizer is left out where transformers cannot rebuild it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": str(path.resolve())}
    logger.info("dequantising %s, once, into %s", path, folder.parent)
    # The legacy reader's progress bar ignores transformers' switch; on a terminal it is worth its line.
    silence = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with silence:
            _check_header(path)
            config = AutoConfig.from_pretrained(**gguf)
            check_decoder(config, str(path))
            # Without `dequantize=True` the weights stay packed wherever the `kernels` package is installed.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **gguf,
                config=config,  # reading it takes as long as reading the vocabulary: not twice
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                output_loading_info=True,
            )
    except UserError:
        raise
    except Exception as error:  # the readers raise whatever a broken file happens to break
        if is_out_of_memory(error):
            raise
        raise UserError(_unreadable(path, error)) from error
    model, report = loaded
    check_loaded(report, str(path))
    model.tie_weights()
    _check_complete(path, model)
    for owner, attribute in [(model, "hf_quantizer"), (model.config, "quantization_config")]:
        if hasattr(owner, attribute):
            delattr(owner, attribute)  # save_pretrained refuses a model that carries either
    model.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(**gguf).save_pretrained(folder)
    except Exception as error:
        logger.info("no tokenizer from %s: %s", path, one_line(error))
