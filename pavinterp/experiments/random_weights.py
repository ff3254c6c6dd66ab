"""The control of training: a model of the same architecture with random weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from pavinterp.errors import UserError
from pavinterp.exits import one_line
from pavinterp.models import ModelHandle


def untrained(handle: ModelHandle, seed: int = 0) -> ModelHandle:
    """A model of the handle's class and configuration, weights drawn anew as its own initialisation does.

    Args:
        handle: the trained model; the new one has its tokenizer, dtype and device.
        seed: of the weights.

    Raises:
        UserError: no such model can be made (quantised weights have no initialisation; code that needs more than a
            configuration).
    """
    config = copy.deepcopy(handle.model.config)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"no random weights for {handle.name}: it is quantised; leave the control out")
    devices = [handle.device] if handle.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            model = type(handle.model)(config)
    except Exception as error:  # whatever a model class needs
        raise UserError(
            f"no model of {handle.architecture} can be made from its configuration ({one_line(error, 120)}): leave the "
            "control out"
        ) from error
    theirs = {name: x.dtype for name, x in [*handle.model.named_parameters(), *handle.model.named_buffers()]}
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(theirs.get(name, handle.dtype))
    for name, buffer in model.named_buffers():  # rotary frequencies stay in float32 where the trained model has them so
        buffer.data = buffer.data.to(theirs.get(name, buffer.dtype))
    model = model.to(device=handle.device).eval()
    return replace(handle, model=model, name=f"{handle.name}, random weights", revision=f"seed {seed}", bridge=None)
