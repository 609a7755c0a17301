"""Run notebooks from first to last cell and write them with their outputs.

    python examples/execute.py [NOTEBOOK ...] [--out FOLDER]

By default the program runs all notebooks of this folder and writes each in place. With
`SCALEDTENSOR_EXAMPLES=small` in the environment a run takes seconds, and its outputs show nothing:
use `--out FOLDER` then.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
LIMIT = 3600  # seconds a cell


def execute(path: Path, folder: Path) -> None:
    """Run the notebook `path`, and write it to `folder` after its last cell."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        kernel_name="python3",
        resources=where,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    # The kernel writes its version, so a run on another machine would change the file.
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, folder / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    parser.add_argument(
        "--out", type=Path, help="folder for the results; by default each notebook is overwritten"
    )
    options = parser.parse_args()
    for path in options.notebooks:
        execute(path, options.out or path.parent)


if __name__ == "__main__":
    main()
