"""Every analysis runs from top to bottom as the notebook it is, and shows its pictures."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

ANALYSES = sorted((Path(__file__).parents[1] / "analyses").glob("[0-9]*.py"))


def test_there_are_analyses():
    assert ANALYSES


@pytest.mark.slow
@pytest.mark.parametrize("path", ANALYSES, ids=lambda p: p.stem)
def test_an_analysis_runs_as_a_notebook(path, tmp_path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND")  # a kernel shows pictures in the notebook unless told otherwise
    monkeypatch.setenv("PAVINTERP_SHORT", "1")  # those that train do just enough to see that everything runs
    notebook = jupytext.read(path)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not any(o.output_type == "error" for o in outputs)
