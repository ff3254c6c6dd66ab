"""Where a model is put and in what precision: the names a user may give, and what they stand for here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pavinterp.errors import UserError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")


def dtype_named(dtype: str | torch.dtype) -> torch.dtype:
    """One of the floating-point types in `DTYPES`; UserError for any other."""
    import torch

    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"unknown dtype {name!r}: give one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def device_named(device: str | torch.device) -> torch.device:
    """The device, once a number has been put on it ("auto": CUDA, else MPS, else CPU); UserError if that fails."""
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if str(device) == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        there = ["auto", "cpu", *["mps"] * mps, *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise UserError(f"no device {str(device)!r} here: give one of {', '.join(there)}") from error
    return place
