"""Columns of text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> Iterator[str]:
    """Lay rows out in columns.

    Args:
        rows: Of as many cells each.
        left: So many columns are flush left, the others, numbers mostly, flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
