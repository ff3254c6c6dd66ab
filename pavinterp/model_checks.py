"""What is asked of a model before it is measured, and what went wrong in a load told in one line."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pavinterp.errors import UserError
from pavinterp.exits import is_out_of_memory, one_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

MIXERS_WITHOUT_ATTENTION = {"linear_attention", "mamba", "recurrent", "conv", "mlp", "moe"}  # in `config.layer_types`


def all_configs(roots: Iterable[Any]) -> list[PreTrainedConfig]:
    """Every distinct configuration object among `roots` and their sub-configurations."""
    from transformers import PreTrainedConfig

    found: dict[int, PreTrainedConfig] = {}
    waiting = list(roots)
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def check_decoder(config: PreTrainedConfig, name: str, live: bool = False) -> None:
    """Raise UserError unless a configuration is that of a decoder with attention; looks at no weights.

    Args:
        config: the model's configuration.
        name: how the message calls the model.
        live: the model exists already, so that it need not be of a class that AutoModelForCausalLM can make.
    """
    from transformers.models.auto import modeling_auto as auto

    kind, advice = config.model_type, "pavinterp measures decoders (causal language models)"
    if config.is_encoder_decoder:
        raise UserError(f"{name} is an encoder-decoder model ({kind}): {advice}")
    # Families of both kinds (BERT, RoBERTa, ...) attend both ways, whatever the class, unless told they are decoders.
    both_ways = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in ("bert-generation", "xlnet")
    if both_ways and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
        raise UserError(f"{name} is an encoder-only model ({kind}): {advice}")
    if not any(_has_attention(part) for part in all_configs([config])):
        raise UserError(f"{name} is a model without attention ({kind}): there are no attention heads to measure")
    # (a repository's own class, where it may be run, is in no mapping of transformers)
    own_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not live and not own_class and type(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"{name} is not a causal language model ({kind}): {advice}")


def _has_attention(config: PreTrainedConfig) -> bool:
    try:
        heads = getattr(config, "num_attention_heads", None)
    except RuntimeError:  # layers that differ: the number stands in each layer's own configuration
        return True
    layers = getattr(config, "layer_types", None)
    return bool(heads) and not (layers and set(layers) <= MIXERS_WITHOUT_ATTENTION)


def check_loaded(report: dict[str, Any], name: str) -> None:
    """Raise UserError where `from_pretrained` made weights up; warn where it left some of the checkpoint out.

    Args:
        report: the loading information that `output_loading_info=True` returns.
        name: how the message calls the model.
    """
    if report["missing_keys"]:
        raise UserError(
            f"{name} lacks {_some(report['missing_keys'])}, which would be random numbers: "
            "its weights and config.json do not belong together, or the download is not complete"
        )
    if report["mismatched_keys"]:
        key, found, expected = sorted(report["mismatched_keys"])[0]
        raise UserError(
            f"{name} holds {key} as {list(found)} where config.json makes it {list(expected)}: "
            "its weights and config.json do not belong together"
        )
    if report["unexpected_keys"]:
        warnings.warn(f"{name}: its model class has no use for {_some(report['unexpected_keys'])}", stacklevel=2)


def _some(keys: Iterable[str]) -> str:
    """The number of weights and the first names: "3 weights (a, b, c)"."""
    names = sorted(keys)
    return f"{len(names)} weight{'s'[: len(names) > 1]} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def check_finite(model: torch.nn.Module, name: str | None = None) -> None:
    """Raise UserError naming the first parameter that holds NaN or infinity.

    One sum a parameter, in float32 at least: it is finite unless a value is not, or the sum itself overflows, and only
    then is every value looked at.
    """
    import torch

    for label, parameter in model.named_parameters():
        values = parameter.detach()
        if values.is_meta or not values.is_floating_point() or type(values) is not torch.Tensor:  # offloaded, quantised
            continue
        values = values.float() if values.element_size() == 1 else values
        total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
        if not torch.isfinite(total):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                raise UserError(
                    f"{name or type(model).__name__}: {label.replace('_original_component.', '')} holds {bad} NaN or "
                    f"infinite values of {values.numel()}: the weights are damaged; download or convert them again"
                )


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers warns of nothing, shows no bars but those of downloads, and has no checkpoints converted."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    conversion = os.environ.get("DISABLE_SAFETENSORS_CONVERSION")
    hook = logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    try:
        logging.set_verbosity_error()
        hub_logging.set_verbosity_error()
        os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "1"  # else pickled hub weights get a pull request on their page
        yield
    finally:
        logging.set_tqdm_hook(hook)
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if conversion is None:
            os.environ.pop("DISABLE_SAFETENSORS_CONVERSION", None)
        else:
            os.environ["DISABLE_SAFETENSORS_CONVERSION"] = conversion


@contextmanager
def explained(name: str, revision: str | None, dtype: torch.dtype, place: Any) -> Iterator[None]:
    """Turn whatever a load raises into a UserError of one line; the original error stays as its cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(explain(error, name, revision, dtype, place)) from error


def explain(error: Exception, name: str, revision: str | None, dtype: torch.dtype, place: Any) -> str:
    """One line for an exception of a load: what, where, what to do."""
    from huggingface_hub import errors as hub
    from huggingface_hub import is_offline_mode
    from safetensors import SafetensorError

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    text, absent = " ".join(one_line(link) for link in chain), f"no folder {name!r} here"
    if any(is_out_of_memory(link) for link in chain) or "Cannot allocate memory" in text:
        return (
            f"out of memory loading {name} as {str(dtype).removeprefix('torch.')} on {place}: "
            "try --dtype bfloat16, another --device, device_map='auto' in Python, or a smaller model"
        )
    if among(hub.GatedRepoError):
        return f"{name} is gated: accept its terms on its page of the Hugging Face hub and set HF_TOKEN"
    if among(hub.RevisionNotFoundError):
        return f"{name} has no revision {revision!r}: give a branch, tag or commit that its page lists"
    if among(hub.RepositoryNotFoundError):
        return f"{absent} and no such model on the Hugging Face hub: check the name; a private one needs HF_TOKEN"
    if among(hub.HFValidationError):
        return f"{absent}, and no Hugging Face id looks like that: check the path, or give an id such as gpt2"
    if among(hub.RevisionResolutionError, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        from_disk = "or give a local folder or .gguf file"
        if is_offline_mode():
            return f"{absent} nor in the Hugging Face cache, and offline mode is on: unset HF_HUB_OFFLINE, {from_disk}"
        return f"{absent}, and the Hugging Face hub cannot be reached: check the network, {from_disk}"
    if among(hub.EntryNotFoundError) or "does not appear to have a file named" in text:
        return f"no config.json or no weights in {name}: check the name; of GGUF files, download one and give its path"
    if "contains custom code" in text or "custom code contained in" in text:
        return f"{name} needs Python code of its own repository: read it, then allow it with --trust-remote-code"
    if among(pickle.UnpicklingError) and "unsupported global" in text.lower():
        return f"the pickled weights of {name} hold more than numbers and were not loaded: convert them to safetensors"
    if among(SafetensorError, EOFError, pickle.UnpicklingError) or "PytorchStreamReader" in text:
        reason = one_line(chain[-1], 100) or "end of file"
        return f"the weights of {name} are corrupt or cut short ({reason}): download them again"
    if among(ImportError):
        return f"{name} needs a package that is not installed: {one_line(error, 200)}"
    if "does not recognize this architecture" in text or "Unrecognized model in" in text:
        return f"config.json of {name} has a model_type that this transformers does not know: correct it, or update"
    return f"cannot load {name}: {one_line(error, 300).rstrip('.')}; check its config.json and the arguments"
