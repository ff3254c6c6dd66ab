"""Certified records: a sweep over an experiment's text that stops before hours of work where a layer is not exact."""

from __future__ import annotations

from typing import Any

import pandas as pd

from pavinterp.capture import certificate
from pavinterp.models import ModelHandle
from pavinterp.run import merge
from pavinterp.stimuli import Stimuli
from pavinterp.sweep import require_known, sweep


def certified_records(
    handle: ModelHandle, text: Stimuli, measures: list[Any], layers: set[int] | None, seed: int
) -> tuple[pd.DataFrame, dict[int, list[float]]]:
    """Records with every position tested, and by layer the largest residual of each head.

    Raises:
        UserError: the certificate fails, or something that is not a gate changes a layer's responses.
    """
    records, residuals = [], dict[int, list[float]]()
    for part in sweep(handle, text, measures, tests=None, layers=layers, batch=1, seed=seed):
        require_known(handle, part.between)
        merge(residuals, part.residuals)
        certificate.require(residuals, handle.dtype, handle.architecture)
        records.append(part.records)
    return pd.concat(records), residuals
