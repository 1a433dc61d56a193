"""The tutorial as one notebook, run by a Jupyter kernel from its first cell to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    """Return the output of a cell as text."""
    texts = [
        output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs
    ]
    return "".join(texts)


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = code_cells(nbformat.read(NOTEBOOK, as_version=4))
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_completely_and_shows_the_numbers_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    monkeypatch.setenv("PHALANX_TUTORIAL_OUT", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")

    executed = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()

    cells = code_cells(executed)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for line in (
        "4 4 8",
        "4 Mesh(pp=1, dp=1, cp=1, tp=4)",
        "torch.Size([64, 4, 512])",
        "largest difference from one process",
    ):
        assert any(line in printed(cell) for cell in cells), line
    data = [output.get("data", {}) for cell in cells for output in cell.outputs]
    assert any("image/png" in formats for formats in data)
