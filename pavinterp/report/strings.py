"""Strings from tokenizers, texts and users, made visible: nothing that hides, reorders or breaks the text around it."""

from __future__ import annotations

import unicodedata
from functools import lru_cache

# Control, format (bidirectional overrides, zero width), surrogates, private use, unassigned; separators but the space.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
# The first 32 by name: few systems have a font with pictures of them.
_NAMES = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI "
    "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
)
_BLANK_LETTERS = "\u115f\u1160\u2800\u3164\uffa0"  # drawn as nothing although they count as letters or symbols
_SIGNS = {" ": " ", "\n": "↵", "\t": "⇥", "\x7f": "⟨DEL⟩"}
_MARKS_IN_A_ROW = 3  # more combining marks than any script needs would be drawn over the lines around


@lru_cache(maxsize=65_536)
def visible(text: str) -> str:
    """`text` with its hidden characters shown: ↵ for a newline, ⇥ for a tab, ⟨ESC⟩, ⟨U+202E⟩.

    Spaces and printable characters stay as they are. The result still has to be escaped for HTML.
    """
    if text.isascii() and text.isprintable():
        return text
    shown, marks = [], 0
    for i, letter in enumerate(text):
        code, category = ord(letter), unicodedata.category(letter)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if letter in _SIGNS:
            shown.append(_SIGNS[letter])
        elif code < 32:
            shown.append(f"⟨{_NAMES.split()[code]}⟩")
        elif category in _HIDDEN or letter in _BLANK_LETTERS or 0xFE00 <= code <= 0xFE0F or marks > _MARKS_IN_A_ROW:
            shown.append(f"⟨U+{code:04X}⟩")
        else:
            shown.append(f"◌{letter}" if marks and i == 0 else letter)
    return "".join(shown)


@lru_cache(maxsize=65_536)
def token(text: str, most: int = 32) -> str:
    """One token on its own: hidden characters shown, spaces at its ends as ·, cut after `most` characters."""
    if not text:
        return "⟨empty⟩"
    body = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - before - len(body) if body else 0
    shown = visible("·" * before + body + "·" * after)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def clipped(text: str, most: int, *, keep: str = "start") -> str:
    """At most `most` visible characters from the start or the end of `text`."""
    shown = visible(text)
    if len(shown) <= most:
        return shown
    return f"…{shown[-most + 1 :]}" if keep == "end" else f"{shown[: most - 1]}…"
