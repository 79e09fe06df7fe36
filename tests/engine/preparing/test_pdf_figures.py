"""Pages that show more than their text says, and such as do not."""

from __future__ import annotations

import pypdfium2
import pytest
from pdf_files import (
    bars,
    cells,
    curve,
    pdf,
    pdf_with_form,
    photograph,
    points,
    round_box,
    rules,
    scribble,
    underlines,
)

from penstock.engine.preparing.pdf_figures import has_figures


@pytest.mark.parametrize(
    "data",
    [
        pdf("A photograph.", photograph(100, 80)),
        pdf("A chart of bars.", rules(5) + bars(3)),
        pdf("A chart with a curve.", rules(5) + curve(20)),
        pdf("A chart of points.", rules(2) + points(12)),
        pdf_with_form("A figure of another program.", curve(20), 1),
        pdf_with_form("A small picture, enlarged.", photograph(30, 20), 4),
    ],
)
def test_a_figure_is_found(data: bytes) -> None:
    (page,) = pypdfium2.PdfDocument(data)
    assert has_figures(page)


@pytest.mark.parametrize(
    "data",
    [
        pdf("Text alone."),
        pdf("With a logo.", photograph(30, 30)),
        pdf("With a symbol.", scribble(20)),
        pdf("Between lines.", rules(20)),
        pdf("Underlined.", underlines(6)),
        pdf("In a table.", rules(20) + cells(14, 6)),
        pdf("In a round box.", round_box()),
        pdf("With marks of a list.", points(3, 4)),
        pdf_with_form("With a logo of another program.", curve(20), 0.1),
        pdf_with_form("With a large picture, reduced.", photograph(200, 150), 0.1),
    ],
)
def test_what_is_no_figure(data: bytes) -> None:
    (page,) = pypdfium2.PdfDocument(data)
    assert not has_figures(page)
