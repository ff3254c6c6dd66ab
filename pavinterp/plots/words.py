"""Numbers and names as people read them: three digits, intervals, horizons, "L03H05"."""

from __future__ import annotations

import math
from typing import Any

MISSING = "–"
INFINITE = "∞"
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def head_name(layer: int, head: int) -> str:
    """`L03H05`: two digits or more, so that names sort."""
    return f"L{layer:02d}H{head:02d}"


def as_float(value: Any) -> float:
    """`value` as a float; NaN for None, `pd.NA` and whatever else is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def number(value: Any, digits: int = 3) -> str:
    """`value` to three significant digits: 7.31, 1,234, 0.0123, 3.10 × 10⁻⁷, –, ∞."""
    x = as_float(value)
    if math.isnan(x):
        return MISSING
    sign = "−" if x < 0 else ""
    x = abs(x)
    if math.isinf(x):
        return sign + INFINITE
    if x == 0:
        return "0"
    exponent = math.floor(math.log10(float(f"{x:.{digits - 1}e}")))
    if exponent < -3 or exponent > 6:
        mantissa = f"{x / 10.0**exponent:.{digits - 1}f}"
        return f"{sign}{mantissa} × 10{str(exponent).translate(_SUPERSCRIPT)}"
    return f"{sign}{x:,.{max(0, digits - 1 - exponent)}f}"


def fixed(value: Any, decimals: int) -> str:
    """`value` with a fixed number of decimals, for columns that are read downwards."""
    x = as_float(value)
    if not math.isfinite(x):
        return number(x)
    text = f"{abs(x):,.{decimals}f}"
    return f"−{text}" if x < 0 and float(text.replace(",", "")) != 0 else text


def count(value: Any) -> str:
    """A whole number with thousands separators."""
    return fixed(value, 0)


def percent(value: Any, decimals: int = 0) -> str:
    """A fraction as a percentage."""
    x = as_float(value)
    return number(x) if not math.isfinite(x) else f"{fixed(100 * x, decimals)} %"


def estimate(value: Any, low: Any, high: Any, *, decimals: int | None = None) -> str:
    """`7.31 [6.91, 7.72]`, or the number alone where it has no interval; three digits, or so many `decimals`."""
    ends = interval(low, high, decimals=decimals)
    shown = number(value) if decimals is None else fixed(value, decimals)
    return shown if ends == MISSING else f"{shown} {ends}"


def interval(low: Any, high: Any, *, decimals: int | None = None) -> str:
    """`[6.91, 7.72]`, or – where there is none; three digits, or so many `decimals`."""
    if math.isnan(as_float(low)) or math.isnan(as_float(high)):
        return MISSING
    a, b = (number(x) if decimals is None else fixed(x, decimals) for x in (low, high))
    return f"[{a}, {b}]"


def horizon(position: Any, context: int) -> str:
    """A context horizon in positions: ∞ where the fit never crosses, `> 10 × context` far beyond what was measured."""
    x = as_float(position)
    if math.isnan(x) or math.isinf(x):
        return number(x)
    if x > 10 * context:
        return "> 10 × context"
    return count(math.floor(x))
