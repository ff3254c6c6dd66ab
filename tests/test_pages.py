"""A report in which only some layers' heads have pages: every head in the index, and no link that leads nowhere."""

from __future__ import annotations

import re

import pytest
import tiny
from test_run import documents, run_on

import pavinterp as pi


def test_pages_for_some_layers(tmp_path):
    run = run_on(tiny.gemma3(), documents(), examples=True)
    index = run.report(tmp_path / "some", pages=[1, 3])
    text = index.read_text()
    assert sorted(p.name[:3] for p in (index.parent / "heads").iterdir()) == ["L01"] * 4 + ["L03"] * 4
    for page in [index, *(index.parent / "heads").iterdir()]:
        for target in re.findall(r'href="([^"#]+)[^"]*"', page.read_text()):
            assert (page.parent / target).exists(), target
    assert "L00H02" in text
    assert "Pages of their own were written for 8 of the heads" in text
    assert "Pages of their own" not in run.report(tmp_path / "all").read_text()


def test_pages_for_layers_that_were_not_measured(tmp_path):
    with pytest.raises(pi.UserError, match=r"pages for layers \[7\]"):
        run_on(tiny.gpt2(), documents()).report(tmp_path / "none", pages=[0, 7])
    assert not (tmp_path / "none").exists()
