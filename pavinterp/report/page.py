"""Rendering: one environment that shows and escapes every string, and pages that load nothing and run nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pavinterp.plots.look import DARK, LIGHT, style_sheet, variables
from pavinterp.report.strings import visible

# Of single letters: names of columns keep their underscores.
_SUBSCRIPT = re.compile(r"(?<![\w_])([A-Za-zΣ])_([A-Za-z0-9]+\*?|\*)")


@cache
def environment() -> Environment:
    """Templates in which every string is made visible, then escaped; only Markup passes as it is."""
    env = Environment(
        loader=PackageLoader("pavinterp.report"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters["typeset"] = typeset
    return env


def render(name: str, /, *, script: bool = False, **context: Any) -> str:
    """The page of templates/`name`.html with its style, its script where it has one, and a policy that
    allows these and nothing else.
    """
    style, code = _style(name), _source("script.js") if script else ""
    policy = [
        "default-src 'none'",
        f"style-src '{_hash(style)}'",
        f"script-src '{_hash(code)}'" if script else "script-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    page = environment().get_template(f"{name}.html")
    return page.render(style=Markup(style), script=Markup(code), policy=Markup("; ".join(policy)), **context)


def typeset(text: str) -> Markup:
    """HTML of a sentence or definition: d_k, a_tj, N_worst with subscripts, squares, norms; 95 % is not torn apart."""
    escaped = str(Markup.escape(visible(text))).replace(" %", "&nbsp;%").replace("sum_", "Σ_")
    escaped = escaped.replace("^2", "²").replace("||", "‖")
    escaped = re.sub(r"\^(\w)", r"<sup>\1</sup>", escaped)
    return Markup(_SUBSCRIPT.sub(r"\1<sub>\2</sub>", escaped))


def _shown(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _style(name: str) -> str:
    themes = f":root{{color-scheme:light dark;{variables(LIGHT)}}}"
    themes += f"@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    return themes + style_sheet() + _packed(_source("style.css") + _source(f"{name}.css"))


def _packed(css: str) -> str:
    """CSS without comments and line breaks: it stands in every page."""
    return re.sub(r"\n", "", re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL))


@cache
def _source(name: str) -> str:
    return files("pavinterp.report").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
