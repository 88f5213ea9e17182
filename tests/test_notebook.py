"""docs/notebook.md in a kernel of Jupyter's, as its readers run it."""

import os

import pytest

from tests.commands import ROOT

pytestmark = pytest.mark.slow


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    jupytext = pytest.importorskip("jupytext", reason="the extra docs needs Python 3.11 or later")
    nbclient = pytest.importorskip("nbclient")
    notebook = jupytext.read(ROOT / "docs" / "notebook.md")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in cells]
    assert printed[0] == "Writing digits.py\n"
    assert printed[2].count("epoch ") == 4
    assert "SIGKILL" in printed[3]
    told = "".join(out.get("text", "") for out in cells[4].outputs)
    assert "resuming from the checkpoint: epoch 3" in told
    assert float(printed[5].partition("%")[0]) > 85
