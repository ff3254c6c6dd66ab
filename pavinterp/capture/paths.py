"""Which way a model's attention is captured: transformers' registry, hooks of a TransformerBridge, or of a family."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pavinterp import plugins
from pavinterp.capture import attention_interface, falcon, gpt_neox_japanese, transformer_lens
from pavinterp.capture.bridge_attention import has_hooks
from pavinterp.capture.call import AttentionCall, OnLayer
from pavinterp.errors import UserError
from pavinterp.exits import is_out_of_memory, one_line
from pavinterp.models import ModelHandle, base_model, untouched

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

ATTENTION_INTERFACE, TRANSFORMER_LENS, MODULE_HOOKS = "attention_interface", "transformer_lens", "module_hooks"
CHOICES = ("auto", ATTENTION_INTERFACE, TRANSFORMER_LENS)
# Families outside the registry that are captured by hooks on their own modules: one file each.
FAMILIES = {name: family.capture for family in (falcon, gpt_neox_japanese) for name in family.ARCHITECTURES}
Capture = Callable[..., AbstractContextManager[None]]

# Largest relative difference of final hidden states between a model and the bridge around its copy. Another order of
# summation gives about 1e-6 (also in float64: both compute norms and softmax in float32), rounding to bfloat16 1e-2
# over 30 layers; another position scheme or mask gives 5e-2 to 1.
SAME_MODEL, SAME_MODEL_16_BIT = 1e-3, 3e-2


def on_path(handle: ModelHandle, capture: str = "auto") -> ModelHandle:
    """The handle to measure: the same, or one whose model is a copy inside a TransformerBridge made for it.

    Args:
        handle: a model, or a TransformerBridge handed over.
        capture: "auto" is the bridge where there is one, else "attention_interface", or where the model's attention
            does not go through the registry hooks on its modules ("module_hooks": some families, and those that other
            packages know) or else
            "transformer_lens"; that asks for a bridge around a copy that shares the model's parameters: a second
            witness of the same model.

    Raises:
        UserError: no such path, or the model cannot be captured that way.
    """
    if capture not in CHOICES:
        raise UserError(f"--capture {capture}: choose among {', '.join(CHOICES)}")
    if capture == ATTENTION_INTERFACE and handle.bridge is not None:
        raise UserError(
            "a TransformerBridge computes attention itself, not through transformers' registry: leave --capture out, "
            "or give the Hugging Face model that it was made from, loaded afresh"
        )
    if capture == ATTENTION_INTERFACE and handle.architecture in FAMILIES:
        raise UserError(f"{handle.architecture} does not call transformers' attention registry: leave --capture out")
    if handle.bridge is not None or capture == ATTENTION_INTERFACE:
        return handle
    if capture == "auto" and handle.architecture in FAMILIES:
        return handle
    fault = why_not_registry(handle) if capture == "auto" else ""
    if fault is None:
        return handle
    if capture == "auto" and (hooks := added_families().get(handle.architecture)):
        return replace(handle, hooks=hooks)
    try:
        bridge = bridge_around_copy(handle)
    except UserError as error:
        if capture == "auto":
            raise UserError(f"{handle.architecture} cannot be measured: {fault}, and {error}") from error
        raise UserError(f"{error}: leave --capture out") from error
    witness = handle.model if hooked_anywhere(handle.model) else None
    return replace(handle, model=bridge.original_model, bridge=bridge, witness=witness, hooks=None)


@cache
def added_families() -> dict[str, Capture]:
    """Captures of other packages (entry-point group `pavinterp.architectures`) by architecture.

    They are asked where neither pavinterp's own files nor transformers' registry capture a model: none can take the
    place of those.
    """
    found: dict[str, Capture] = {}

    def accept(name: str, family: Any, package: str) -> None:
        architectures, capture = getattr(family, "ARCHITECTURES", None), getattr(family, "capture", None)
        if not isinstance(architectures, tuple) or not all(isinstance(one, str) for one in architectures):
            raise UserError("name a module with ARCHITECTURES, a tuple of class names of models")
        if not callable(capture):
            raise UserError("its capture(model, on_layer, layers) is missing")
        if twice := [one for one in architectures if one in FAMILIES or one in found]:
            raise UserError(f"{twice[0]} is captured already")
        found.update(dict.fromkeys(architectures, capture))

    plugins.load(
        "architectures", accept, [family.__name__.rpartition(".")[2] for family in (falcon, gpt_neox_japanese)]
    )
    return found


def hooked_anywhere(model: nn.Module) -> bool:
    """Whether forward hooks or pre-hooks are on any module of a model."""
    return any(has_hooks(module) for module in model.modules())


def require_witness(handle: ModelHandle, tokens: Tensor, states: Float[Tensor, "batch n width"]) -> None:
    """Stop where a bridge passed by hooks of the user's that the model it was made around has.

    A bridge computes some modules itself, and the hooks on those do nothing in it.

    Args:
        handle: as it is captured; without a witness nothing is compared.
        tokens: what was read.
        states: final hidden states of the bridge.

    Raises:
        UserError: the model's own final hidden states differ.
    """
    if handle.witness is None:
        return
    with untouched(handle.witness), torch.no_grad():
        own = base_model(handle.witness)(input_ids=tokens, use_cache=False)[0].float()
    difference = float((own - states.float()).norm() / own.norm())
    if not difference <= _same_model(handle):
        raise UserError(
            f"{handle.architecture} carries hooks that do nothing in the TransformerBridge that it is measured in "
            f"(final hidden states differ by {difference:.1e}): take them off, or put them on a bridge of your own and "
            "give that"
        )


def why_not_registry(handle: ModelHandle) -> str | None:
    """Why the model's attention cannot be captured through transformers' registry; None where it can.

    Found by running a few tokens.
    """
    seen: list[AttentionCall] = []
    try:
        with untouched(handle.model), attention_interface.capture(handle.model, seen.append):
            forward(handle, few_tokens(handle))
    except UserError as error:
        return str(error)
    except Exception as error:
        _require_runs(handle, error)
        raise
    return None if seen else "no attention of it goes through transformers' attention registry"


def _require_runs(handle: ModelHandle, seen: Exception) -> None:
    """UserError where a model that failed with capture on fails without it too."""
    if is_out_of_memory(seen):
        return
    try:
        with untouched(handle.model):
            forward(handle, few_tokens(handle))
    except Exception as error:  # whatever its code raises
        dtype = str(handle.dtype).removeprefix("torch.")
        raise UserError(
            f"{handle.architecture} itself does not run here in {dtype} ({one_line(error, 200)}): try another dtype, "
            "device or attention implementation"
        ) from error


def few_tokens(handle: ModelHandle) -> Int[Tensor, "1 n"]:
    """Eight token ids (or as many as the model has positions), to find out with what a forward pass is made of."""
    rng = np.random.default_rng(0)
    length = min(8, handle.max_context or 8)
    return torch.from_numpy(rng.integers(0, min(handle.vocabulary_size, 1000), (1, length))).to(handle.device)


def path_of(handle: ModelHandle) -> str:
    """The path by which a handle is captured, as the manifest names it."""
    if handle.bridge is not None:
        return TRANSFORMER_LENS
    return MODULE_HOOKS if handle.hooks or handle.architecture in FAMILIES else ATTENTION_INTERFACE


def capture_for(handle: ModelHandle, on_layer: OnLayer, layers: set[int] | None = None) -> AbstractContextManager[None]:
    """While active, every `forward` of the handle hands each attention layer's call to `on_layer`, once."""
    if handle.bridge is None:
        by = handle.hooks or FAMILIES.get(handle.architecture, attention_interface.capture)
        return by(handle.model, on_layer, layers)
    return transformer_lens.capture(handle.bridge, on_layer, layers)


def forward(handle: ModelHandle, tokens: Tensor) -> Float[Tensor, "batch n width"]:
    """Final hidden states: no LM head, no KV cache, no gradients; through the bridge where there is one.

    `no_grad` rather than inference mode: a model may keep a tensor it makes on the way (rotary frequencies),
    and an inference tensor left in a live model would break its owner's next training step.
    """
    with torch.no_grad():
        if handle.bridge is None:
            return base_model(handle.model)(input_ids=tokens, use_cache=False)[0]
        return transformer_lens.forward(handle.bridge, tokens)


def bridge_around_copy(handle: ModelHandle) -> TransformerBridge:
    """A TransformerBridge around a copy of the model's modules; the copy shares the model's parameters.

    A bridge replaces modules of the model that it is made from, so a live one is never handed over itself.

    Raises:
        UserError: transformer_lens is missing, does not know the architecture, or computes something else than the
            model does.
    """
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError as error:
        raise UserError(
            "transformer_lens, the other way to capture it, is not installed (pip install 'pavinterp[lens]')"
        ) from error
    model: Any = handle.model
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UserError("no TransformerBridge is made around a model that is spread over devices")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):  # a bridge may read past them
        raise UserError("no TransformerBridge is made around a model with adapters: merge them (merge_and_unload)")
    try:
        twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        bridge = build_bridge_from_module(twin, handle.architecture, hf_config=twin.config)
        _require_same(handle, replace(handle, model=twin, bridge=bridge))
    except UserError:
        raise
    except Exception as error:  # what an adapter raises for a model that it does not know is not documented
        raise UserError(
            f"transformer_lens cannot make a bridge around {handle.architecture} ({one_line(error, 160)})"
        ) from error
    return bridge


def _require_same(one: ModelHandle, other: ModelHandle, length: int = 32) -> None:
    """UserError where two handles' models differ in their final hidden states on a few tokens."""
    tokens = (torch.arange(min(length, one.max_context or length), device=one.device) * 7 % one.vocabulary_size)[None]
    with untouched(one.model), untouched(other.model):
        mine, theirs = (forward(handle, tokens).float() for handle in (one, other))
    if not torch.isfinite(mine).all():
        where = _first_not_finite(other, tokens)
        raise UserError(f"{one.architecture} puts out NaN or infinity{where}: check the weights, or measure in float32")
    difference = float((mine - theirs).norm() / mine.norm())
    if not difference <= _same_model(one):
        raise UserError(
            f"transformer_lens computes something else than {one.architecture}: final hidden states differ by "
            f"{difference:.1e}"
        )


def _same_model(handle: ModelHandle) -> float:
    return SAME_MODEL if handle.dtype.itemsize >= 4 else SAME_MODEL_16_BIT


def _first_not_finite(handle: ModelHandle, tokens: Tensor) -> str:
    """Where that begins among the responses: ", first in layer 3 head 1"; empty where those are finite."""
    found: list[str] = []

    def on_layer(call: AttentionCall) -> None:
        heads = (~torch.isfinite(call.response[0])).unflatten(-1, (call.queries.shape[1], -1)).any(-1).any(0)
        if bool(heads.any()):
            found.append(f", first in layer {call.layer} head {int(heads.nonzero()[0])}")

    try:
        with untouched(handle.model), capture_for(handle, on_layer):
            forward(handle, tokens)
    except UserError as error:  # scores are compared before the response is seen
        found.append(f" ({error})")
    return found[0] if found else ""
