"""Random or hand-made Trials without a model, for tests of the measures."""

from __future__ import annotations

import torch

from pavinterp.capture.output_projection import write_factor
from pavinterp.trials import Trials


def make_trials(
    n=24, heads=4, kv_heads=2, d_k=8, d_v=6, width=16, tests=None, seed=0, softcap=None, sinks=False, window=None,
    gated=False, dtype=torch.float64, **given,
) -> tuple[Trials, torch.Tensor]:  # fmt: skip
    """Trials with everything random unless given, and the W_O [heads, d_v, width] they were made from."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    positions = torch.arange(n) if tests is None else torch.tensor(tests)
    hidden = torch.arange(n)[None] > positions[:, None]
    if window is not None:
        hidden = hidden | (torch.arange(n)[None] <= positions[:, None] - window)
    w_o = normal(heads, d_v, width)  # drawn also where one is given, so that the rest stays the same
    w_o = given.pop("w_o", w_o)
    values: dict = dict(  # noqa: C408
        layer=0,
        tokens=torch.randint(0, 50, (n,), generator=rng),
        tests=positions,
        weights=torch.ones(len(positions), dtype=dtype),
        queries=normal(heads, n, d_k),
        keys=normal(kv_heads, n, d_k),
        values=normal(kv_heads, n, d_v),
        bias=torch.zeros(1, len(positions), n, dtype=dtype).masked_fill_(hidden, float("-inf")),
        scale=d_k**-0.5,
        softcap=softcap,
        sinks=normal(heads) if sinks else None,
        memory_start=max(0, n - window) if window else 0,
        write=write_factor(w_o, dtype),
        gate=normal(heads, len(positions), d_v).sigmoid() if gated else None,
    )
    return Trials(**(values | given)), w_o
