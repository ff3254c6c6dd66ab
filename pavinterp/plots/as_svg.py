"""Draws a picture as a small SVG: no ids, no script, colours by style sheet, so that thousands fit into pages."""

from __future__ import annotations

from html import escape

from pavinterp.plots.look import LIGHT, plain_style_sheet
from pavinterp.plots.marks import Picture
from pavinterp.plots.svg_marks import Link, draw
from pavinterp.plots.svg_sheet import lay_out

MARGIN = 12.0  # pixels around a picture that is a file of its own


def svg(picture: Picture, width: float = 360.0, link: Link | None = None, *, alone: bool = False) -> str:
    """The picture as an `<svg>` element.

    Args:
        picture: what to draw.
        width: of the whole picture in pixels; its height follows.
        link: address of the page of a head, by its name; points and cells lead there.
        alone: a file of its own, with its style and a white background instead of leaving both to the page.

    Returns:
        The element; everything in it is escaped.
    """
    sheet = lay_out(picture, width)
    if picture.missing:
        sheet.text(0, (sheet.top + sheet.bottom) / 2, f"– {picture.missing}", "t")
    else:
        for mark in picture.marks:
            draw(sheet, mark, link)
    label = escape(picture.description, quote=True)
    body = "".join(sheet.parts + sheet.last)
    if not alone:
        size = f'viewBox="0 0 {width:g} {sheet.height:g}" width="{width:g}" height="{sheet.height:g}"'
        return f'<svg class="pic" role="img" aria-label="{label}" {size}>{body}</svg>'
    wide, tall = width + 2 * MARGIN, sheet.height + 2 * MARGIN
    size = f'viewBox="{-MARGIN:g} {-MARGIN:g} {wide:g} {tall:g}" width="{wide:g}" height="{tall:g}"'
    paper = f'<rect x="{-MARGIN:g}" y="{-MARGIN:g}" width="{wide:g}" height="{tall:g}" fill="{LIGHT["paper"]}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pic" role="img" {size}><title>{label}</title>'
        f"<style>{plain_style_sheet()}</style>{paper}{body}</svg>\n"
    )
