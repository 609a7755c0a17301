"""Run notebooks from first to last cell and write them with their outputs.

    python examples/execute.py [NOTEBOOK ...] [--out FOLDER]

All of this folder by default, each in its place. `SCALEDTENSOR_EXAMPLES=small` in the environment
makes runs of seconds, whose outputs show nothing: give them a FOLDER.
"""

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
LIMIT = 3600  # seconds a cell


def execute(path: Path, folder: Path) -> None:
    """`path` itself is written only if `folder` is where it lies, and only after its last cell."""
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
    # The kernel notes its version: every run on another machine would be a change of the file.
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, folder / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(HERE.glob("*.ipynb")))
    parser.add_argument("--out", type=Path, help="where to write them; by default where they are")
    options = parser.parse_args()
    for path in options.notebooks:
        execute(path, options.out or path.parent)


if __name__ == "__main__":
    main()
