"""Loading a decoder: hub id, local folder, .gguf file, "demo", a live Hugging Face model or a TransformerBridge."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pavinterp.adapters import adapter_beside, model_with_adapters, require_weights_only
from pavinterp.compiled import uncompiled, without_wrapper
from pavinterp.devices import device_named, dtype_named
from pavinterp.errors import UserError
from pavinterp.exits import one_line
from pavinterp.gguf_cache import dequantised_folder
from pavinterp.model_checks import all_configs, check_decoder, check_finite, check_loaded, explained, quiet
from pavinterp.model_folder import check_folder, weights_hash

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ModelHandle", "check_finite", "fingerprint", "load", "untouched"]

_locks: dict[int, Any] = {}  # by id of a configuration (of a model without one), for as long as that lives
_locks_lock = threading.Lock()

CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


@dataclass(frozen=True)
class ModelHandle:
    """A decoder ready to be measured, and where it came from."""

    model: PreTrainedModel = field(repr=False)  # a live one handed in is the very object
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    name: str  # "demo", hub id, folder name, file stem, or class name of a live model
    source: str  # "demo" | "hub" | "folder" | "gguf" | "live" | "bridge"
    revision: str  # commit of a hub id; "sha256:..." of the weight file(s) or, for a live model, see `fingerprint`
    bridge: Any | None = field(default=None, repr=False)  # the TransformerBridge handed in, else None
    words: tuple[str, ...] | None = field(default=None, repr=False)  # of the command line that loads it, if one can
    witness: PreTrainedModel | None = field(default=None, repr=False)  # where it has hooks: the bridge is of a copy
    hooks: Callable[..., Any] | None = field(default=None, repr=False)  # another package's capture of its family

    @property
    def device(self) -> torch.device:
        """Device that token ids go to: that of the input embedding, where a device map spreads the model."""
        import torch

        embedding: Any = self.model.get_input_embeddings()
        device = next(embedding.parameters()).device
        if device.type != "meta":
            return device
        computes_on = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)  # off-loaded
        return torch.device("cpu" if computes_on is None else computes_on)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the parameters."""
        return self.model.dtype

    @property
    def max_context(self) -> int | None:
        """Positions that the configuration declares; None where it declares no limit."""
        config = self.model.config.get_text_config()
        declared = (getattr(config, name, None) for name in CONTEXT_NAMES)
        return next((limit for limit in declared if isinstance(limit, int) and limit > 0), None)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids: as many as the configuration declares, and as the embedding has rows for."""
        declared = int(self.model.config.get_text_config().vocab_size)
        rows = getattr(self.model.get_input_embeddings(), "num_embeddings", declared)
        return min(declared, rows)

    @property
    def architecture(self) -> str:
        """Class name of the Hugging Face model."""
        return type(self.model).__name__

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def load(
    spec: Any = "demo",
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    device_map: str | dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    tokenizer: PreTrainedTokenizerBase | str | bool | None = None,
) -> ModelHandle:
    """Load a decoder and its tokenizer.

    Never runs code of the model's repository unless `trust_remote_code`; takes safetensors where there are any, and
    unpickles other weights with `weights_only=True` only. Refuses a checkpoint that lacks weights or holds NaN.

    Args:
        spec: a Hugging Face hub id (through the ordinary cache, with HF_TOKEN, HF_HUB_OFFLINE and the like), a local
            folder, a `.gguf` file (dequantised once, see `gguf_cache`), "demo" (the embedded model), a Hugging Face
            causal language model in memory, or a `TransformerBridge`. The last two are taken as they are.
        revision: branch, tag or commit of a hub id.
        dtype: float32, bfloat16, float16 or float64.
        device: "auto" (CUDA, else MPS, else CPU), or a torch device.
        device_map: accelerate's placement over several devices ("auto", or a dict), instead of `device`.
        trust_remote_code: let the model's repository run its own Python code here.
        tokenizer: a tokenizer, or the id or folder of one, instead of the model's own; False for none.

    Raises:
        UserError: one line that says what is wrong, where, and what to do.
    """
    if not isinstance(spec, (str, os.PathLike)):
        changes = {
            "revision": revision is not None,
            "dtype": str(dtype) not in ("float32", "torch.float32"),
            "device": str(device) != "auto",
            "device_map": device_map is not None,
            "trust_remote_code": trust_remote_code,
        }
        for argument, given in changes.items():
            if given:
                raise UserError(f"{argument}= with a model in memory: it is taken as it is; leave {argument} out")
        return _live(spec, tokenizer)

    spec = os.fspath(spec)
    source, name, location = _locate(spec)
    if revision is not None and source != "hub":
        raise UserError(f"revision {revision!r} with {spec}: only a Hugging Face id has revisions; leave it out")
    if device_map is not None and str(device) != "auto":
        raise UserError(f"both device {device} and device_map {device_map}: give one of them")
    torch_dtype, place = dtype_named(dtype), device_named(device) if device_map is None else None
    options: dict[str, Any] = {"trust_remote_code": bool(trust_remote_code)}  # None would ask on the terminal
    version = ""
    with quiet(), explained(spec, revision, torch_dtype, place or device_map):
        if source == "hub":
            from huggingface_hub import hf_hub_download, resolve_revision

            # one commit for configuration, weights and tokenizer, whatever is pushed meanwhile
            options["revision"] = resolve_revision(spec, revision=revision)
            version = options["revision"].resolved
            hf_hub_download(
                spec, "config.json", revision=options["revision"]
            )  # transformers shrugs where there is none
        elif source == "gguf":
            folder, digest = dequantised_folder(Path(location))
            location, version = str(folder), f"sha256:{digest}"
        else:
            check_folder(Path(location))
        model = _pretrained(location, spec, torch_dtype, place, device_map, options)
        check_finite(model, spec)
        found = _tokenizer(tokenizer, location, spec, options)
        version = version or f"sha256:{weights_hash(Path(location))}"
    words = _words(spec, revision, torch_dtype, device, device_map, trust_remote_code, tokenizer)
    return ModelHandle(model, found, name, source, version, words=words)


def _words(
    spec: str, revision: Any, dtype: torch.dtype, device: Any, device_map: Any, trusted: bool, tokenizer: Any
) -> tuple[str, ...] | None:
    """The command line's words for what was loaded; None where an argument exists in Python only."""
    if device_map is not None or not (tokenizer is None or isinstance(tokenizer, (str, os.PathLike))):
        return None
    words = [spec]
    words += ["--revision", revision] if revision is not None else []
    words += ["--dtype", str(dtype).removeprefix("torch.")] if str(dtype) != "torch.float32" else []
    words += ["--device", str(device)] if str(device) != "auto" else []
    words += ["--tokenizer", os.fspath(tokenizer)] if tokenizer is not None else []
    return (*words, "--trust-remote-code") if trusted else tuple(words)


def _locate(spec: str) -> tuple[str, str, str]:
    """(source, name, where to load from) of a model given as a string."""
    path = Path(os.path.expanduser(spec))
    if not spec.strip():
        raise UserError("no model given: give demo, a Hugging Face id such as gpt2, a folder or a .gguf file")
    if spec == "demo":
        return "demo", "demo", str(files("pavinterp") / "demo")
    if path.is_dir():
        return "folder", path.resolve().name, str(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"no file {spec}: check the path")
        return "gguf", path.stem, str(path)
    if path.is_file():
        raise UserError(f"{spec} is a file, not a model: give its folder (with config.json), or a .gguf file")
    if spec.startswith((".", "~", os.sep)) or "\\" in spec or spec.count("/") > 1:
        raise UserError(f"no folder {spec!r}: check the path, or give a Hugging Face id such as gpt2")
    return "hub", spec, spec


def _pretrained(
    location: str,
    spec: str,
    dtype: torch.dtype,
    place: torch.device | None,
    device_map: str | dict[str, Any] | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """The model at a folder or hub id; its configuration is looked at before its weights are fetched."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import is_accelerate_available

    config = AutoConfig.from_pretrained(location, **options)
    check_decoder(config, spec)
    if not options["trust_remote_code"]:
        for part in all_configs([config]):
            if "/" in str(part._attn_implementation_internal):  # a kernel to be fetched from the hub and run
                part._attn_implementation_internal = None
    if not is_accelerate_available():
        if device_map is not None:
            raise UserError("device_map needs the package accelerate: pip install accelerate, or give device instead")
    elif place is not None and place.type != "cpu":
        device_map = {"": place}  # straight to the device, without a copy in main memory
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        location,
        config=config,
        dtype=dtype,
        device_map=device_map,
        weights_only=True,
        ignore_mismatched_sizes=True,  # so that they are in the report, which refuses them
        output_loading_info=True,
        **options,
    )
    model, report = loaded
    check_loaded(report, spec)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(adapter_beside(spec))
    return model if place is None else model.to(place)


def _tokenizer(
    chosen: PreTrainedTokenizerBase | str | bool | None, location: str, spec: str, options: dict[str, Any]
) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, else the model's own."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if chosen is False:
        return None
    if isinstance(chosen, (str, os.PathLike)):
        location = spec = os.fspath(chosen)
        options = {**options, "revision": None}
    elif isinstance(chosen, PreTrainedTokenizerBase):
        return chosen
    elif chosen is not None:
        raise UserError(
            f"tokenizer={chosen!r:.60} is no tokenizer: give one of transformers', its id or its folder, or False"
        )
    advice = "name one with --tokenizer, by id or folder (in Python tokenizer=, or False and token ids as the corpus)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
    except Exception as error:  # what is raised for a missing or broken vocabulary depends on the class
        raise UserError(f"no tokenizer to be had from {spec} ({one_line(error, 120)}): {advice}") from error
    # Without vocabulary files transformers may make a tokenizer that knows its special tokens and nothing else.
    if len(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)) < 2:
        raise UserError(f"no tokenizer files with {spec}: {advice}")
    return tokenizer


def _live(model: Any, tokenizer: PreTrainedTokenizerBase | str | bool | None) -> ModelHandle:
    """A model in memory, or inside a TransformerBridge, torch.compile or PEFT, taken as it is."""
    from transformers import PreTrainedModel

    bridge, model = None, without_wrapper(model)
    if any(kind.__module__.split(".")[0] == "transformer_lens" for kind in type(model).__mro__):
        from transformer_lens.model_bridge import TransformerBridge

        if not isinstance(model, TransformerBridge):
            raise UserError(f"{type(model).__name__} of transformer_lens: give a TransformerBridge (boot_transformers)")
        bridge, model = model, model.original_model
        tokenizer = bridge.tokenizer if tokenizer is None else tokenizer
    elif any(kind.__module__.split(".")[0] == "peft" for kind in type(model).__mro__):
        model = model_with_adapters(model)
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{name} is not a Hugging Face model: give one from AutoModelForCausalLM (not wrapped in anything but PEFT "
            "or torch.compile), a TransformerBridge, a Hugging Face id, a folder or a .gguf file"
        )
    require_weights_only(model)
    check_decoder(model.config, name, live=True)
    if model.get_output_embeddings() is None:
        raise UserError(f"{name} has no language-model head: load it with AutoModelForCausalLM")
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())  # accelerate brings weights when called
    if not offloaded and all(parameter.is_meta for parameter in model.parameters()):
        raise UserError(f"{name} holds no weights (it is on the meta device): load it with from_pretrained")
    check_finite(model, name)
    if tokenizer is not None:
        with quiet():
            tokenizer = _tokenizer(tokenizer, "", "", {"trust_remote_code": False})
    return ModelHandle(model, tokenizer, name, "bridge" if bridge is not None else "live", fingerprint(model), bridge)


def fingerprint(model: PreTrainedModel, *, buffers: bool = False) -> str:
    """SHA-256 ("sha256:...") of a model in memory: its configuration, and of each parameter the name, shape and values.

    Args:
        model: in memory; what is on the meta device counts by name and shape.
        buffers: whether those count too: rotary frequencies and the like, which another machine may compute otherwise.
    """
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in [*model.named_parameters(), *(model.named_buffers() if buffers else ())]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for plain in _plain_tensors(tensor.detach()):
            if not plain.is_meta and plain.numel():
                digest.update(_checksum(plain).to_bytes(8, "little", signed=True))
    return f"sha256:{digest.hexdigest()}"


def _checksum(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's bytes, computed where it lies: its words, mixed with their places, added up."""
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    whole = len(flat) // 8 * 8
    parts = [*flat[:whole].view(torch.int64).split(2**20), flat[whole:].to(torch.int64)]
    place = torch.arange(len(parts[0]) + 8, device=flat.device)
    multiplier, total = place * -7046029254386353131 | 1, 0
    for part in parts:  # products wrap around, as a hash's do
        mixed = (part + place[: len(part)]) * multiplier[: len(part)]
        mixed ^= mixed >> 29
        total = (total * 6364136223846793005 + int(mixed.sum()) + 1) % 2**64
    return total - 2**63


def _plain_tensors(tensor: Any) -> list[torch.Tensor]:
    """The tensor, or those that a quantised one is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in _plain_tensors(getattr(tensor, name))]


def base_model(model: Any) -> Any:
    """The model without its LM head: what maps tokens to final hidden states."""
    base = model.base_model
    return getattr(base, "model", base) if base is model else base  # Llama 4's text model: its prefix names nothing


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and nothing compiled; on leaving, by whatever way, the model is as it was.

    Restored: each module's training flag, each parameter's requires_grad, the attention implementation of every
    configuration in the model, and rotary frequencies that follow the length of what is read (dynamic, longrope).
    Hooks are the business of whoever adds them. One thread at a time has a model, and those that share its
    configuration (where the attention implementation stands): another waits here.
    """
    with _lock_of(model), uncompiled(model), _restored(model):
        yield


def _lock_of(model: torch.nn.Module) -> Any:
    owner = getattr(model, "config", model)
    with _locks_lock:
        if id(owner) not in _locks:
            _locks[id(owner)] = threading.RLock()
            weakref.finalize(owner, _locks.pop, id(owner))
        return _locks[id(owner)]


@contextmanager
def _restored(model: torch.nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    configs = all_configs(getattr(module, "config", None) for module in model.modules())
    attention = [(config, config._attn_implementation_internal) for config in configs]
    rotary = [_rotary_state(module) for module in model.modules()]
    try:
        for module, _ in training:
            module.training = False  # not eval(), which some adapters override to merge themselves into the weights
        yield
    finally:
        for restore in rotary:
            restore()
        for module, flag in training:
            module.training = flag
        for parameter, wanted in gradients:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        for config, implementation in attention:
            config._attn_implementation_internal = implementation  # the public setter would spread to others


def _rotary_state(module: torch.nn.Module) -> Callable[[], None]:
    """A function that gives a module the rotary frequencies back that it has now, and what it noted beside them."""
    state = ("inv_freq", "max_seq_len_cached", "attention_scaling")  # names, after "" or "full_attention_" and the like
    buffers = {name: b for name, b in module._buffers.items() if b is not None and name.endswith("inv_freq")}
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    noted = {name: value for name, value in vars(module).items() if name.endswith(state)}

    def restore() -> None:
        for name, buffer in buffers.items():
            module._buffers[name] = buffer
            buffer.copy_(values[name])  # the very tensor: CUDA graphs replay from its address
        for name in [name for name in vars(module) if name.endswith(state)]:
            del vars(module)[name]
        vars(module).update(noted)

    return restore
