"""The notebooks run from top to bottom, and hold no path of the machine that wrote them."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.slow  # the default target is fetched where it is not in the user's cache
@pytest.mark.filterwarnings("default")  # of the notebook's machinery, none of ours
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path) -> None:
    """Every cell runs; what cells assert holds."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_committed_outputs_are_whole_and_tidy(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    text = path.read_text(encoding="utf-8")
    for trace in ("Error", "Traceback", str(Path.home()), str(ROOT), "/tmp/"):
        assert trace not in text
