"""Adapters of PEFT on a model in memory: what is inside the wrapper, where that computes what the wrapper does."""

from __future__ import annotations

from typing import Any

from pavinterp.errors import UserError

SAME = 1e-5  # relative difference of logits: none is expected, as the same modules compute


def adapter_beside(place: str) -> str:
    """The message for a folder or repository of a model that holds an adapter too."""
    return (
        f"{place} holds an adapter (adapter_config.json) beside the model: merge it into the model and save that, take "
        "the adapter's files away, or hand over the PeftModel in Python"
    )


def model_with_adapters(wrapper: Any) -> Any:
    """The Hugging Face model inside a PeftModel, with its adapters in place, active or disabled as they are.

    Raises:
        UserError: the wrapper computes something else than the model inside it (prompts, prefixes, adapters that it
            switches on itself).
    """
    name = type(wrapper).__name__
    configs = list(getattr(wrapper, "peft_config", {}).values())
    kinds = ", ".join(sorted({str(getattr(config.peft_type, "value", config.peft_type)) for config in configs}))
    refusal = UserError(
        f"{name} ({kinds}) computes something else than the model inside it: only adapters that change weights (LoRA "
        "and the like) can be measured; load the base model afresh to measure that"
    )
    if any(config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None) for config in configs):
        raise refusal
    inner = getattr(wrapper.base_model, "model", wrapper.base_model)
    try:
        differs = _differs(wrapper, inner)
    except (TypeError, ValueError) as error:  # it wants more than tokens, such as the number of a task
        raise refusal from error
    if differs:
        raise refusal
    return inner


def require_weights_only(model: Any) -> None:
    """Stop where PEFT's modules in a model do more than change a layer's weights, such as attention to prompts.

    Raises:
        UserError: naming the first such module.
    """
    import sys

    tuners, other = (sys.modules.get(f"peft.{name}") for name in ("tuners.tuners_utils", "utils.other"))
    if tuners is None or other is None:  # PEFT is not in use
        return
    # the second: whole layers, or single tokens, that were trained beside an adapter
    weights = (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper)
    found = {name: module for name, module in model.named_modules() if type(module).__module__.startswith("peft.")}
    layers = [name for name, module in found.items() if isinstance(module, weights)]
    for name, module in found.items():
        if not any(f"{name}.".startswith(f"{layer}.") for layer in layers):
            raise UserError(
                f"{type(model).__name__} holds {type(module).__name__} of PEFT at {name}, which does more than change "
                "weights: only adapters that change weights (LoRA and the like) can be measured; unload it"
            )


def _differs(wrapper: Any, inner: Any) -> bool:
    """Whether the logits of the two differ on a few tokens."""
    import torch

    from pavinterp.models import untouched

    device = next(inner.get_input_embeddings().parameters()).device
    vocabulary = inner.config.get_text_config().vocab_size
    tokens = (torch.arange(8) * 7 % vocabulary)[None].to("cpu" if device.type == "meta" else device)
    with untouched(wrapper), torch.no_grad():
        one, two = (model(input_ids=tokens, use_cache=False).logits.float() for model in (wrapper, inner))
    return one.shape != two.shape or not float((one - two).norm()) <= SAME * float(two.norm())
