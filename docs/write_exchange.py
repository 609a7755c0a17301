"""Writes the tables of layouts in docs/how_to/exchange.md from `scaledtensor.exchange.FORMATS`.

python docs/write_exchange.py
"""

from pathlib import Path

from scaledtensor.exchange import FORMATS, Family, Layout

PAGE = Path(__file__).parent / "how_to" / "exchange.md"
BEGIN, END = "<!-- layouts: python docs/write_exchange.py -->\n", "<!-- end of layouts -->\n"


def row(layout: Layout) -> str:
    """Return one layout as a line of a table."""
    cells = (
        layout.name,
        f"`{layout.config}`" + (", any group" if layout.groups else ""),
        layout.difference,
        layout.decoded,
        ", ".join(layout.readers),
    )
    return "| " + " | ".join(cells) + " |"


def table(family: Family) -> str:
    """Return the table of one family, under its name."""
    head = ("layout", "config here", "saved and loaded", "decoded by its package", "readers")
    return "\n".join(
        (
            f'**"{family.name}"**: {family.library}, checked with {family.checked}.',
            "",
            "| " + " | ".join(head) + " |",
            "|---" * len(head) + "|",
            *map(row, family.layouts),
            "",
        )
    )


def written(page: str) -> str:
    """Return the page with present tables."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(map(table, FORMATS.values())) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
