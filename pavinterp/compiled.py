"""Models under torch.compile are measured uncompiled: the same arithmetic up to rounding, and hooks are seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_lock = threading.Lock()
_inside = 0  # measurements of compiled models that are in progress, in all threads
_eager = ExitStack()  # while there are any


def without_wrapper(model: Any) -> Any:
    """The module that `torch.compile(module)` wrapped; anything else as it is."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model


def is_compiled(module: Any) -> bool:
    """Whether a module is wrapped by torch.compile, or its call or its forward is compiled."""
    state = vars(module)
    return (
        type(module).__name__ == "OptimizedModule"
        or state.get("_compiled_call_impl") is not None
        or hasattr(state.get("forward"), "_torchdynamo_orig_callable")
    )


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Inside, whatever torch.compile made is run as the Python it was made from, where part of `model` is compiled.

    A compiled graph does not call hooks that came later, and one made meanwhile would hold ours. The switch is the
    process's: compiled models of other threads run uncompiled too as long as one is measured, which is slower and as
    right.
    """
    global _inside
    if not any(is_compiled(module) for module in model.modules()):
        yield
        return
    import torch

    with _lock:
        _inside += 1
        if _inside == 1:
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _eager.close()
