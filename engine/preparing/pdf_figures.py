"""Whether a page of a PDF shows more than its text says: photographs, charts, drawings.

A picture does, if it takes a part of the page that a logo does not, and so does a path that goes as far aslant, like
the curve of a chart or a circle. Many small ones do together, like the points of a chart, and boxes that stand side by
side on one line and differ in height, like its bars. What runs along the page, like rules, boxes and tables, does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from ctypes import byref, c_float
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pypdfium2

SHARE = 0.02  # of the page's area; less is a logo, a symbol or an ornament
FAR = 72.0  # points, aslant; corners of a round box are less
MANY = 12  # paths that go aslant at all
BARS = 3  # of different lengths
THIN = 2.0  # points; less is a rule
ROUNDED = 0.01  # points that a line along the page may miss it by
MOST_OBJECTS, MOST_SEGMENTS = 20_000, 100_000  # of a page that are looked at
DEPTH = 4  # of forms in forms


class Box(NamedTuple):
    """A part of a page, in points."""

    left: float
    bottom: float
    right: float
    top: float

    @property
    def width(self) -> float:
        return max(0.0, self.right - self.left)

    @property
    def height(self) -> float:
        return max(0.0, self.top - self.bottom)

    @property
    def area(self) -> float:
        return self.width * self.height

    def within(self, other: Box) -> Box:
        left, bottom = max(self.left, other.left), max(self.bottom, other.bottom)
        return Box(left, bottom, min(self.right, other.right), min(self.top, other.top))

    def around(self, other: Box) -> Box:
        left, bottom = min(self.left, other.left), min(self.bottom, other.bottom)
        return Box(left, bottom, max(self.right, other.right), max(self.top, other.top))


class _Thing(NamedTuple):
    """An object on a page; `space` takes its own space to that of the page."""

    kind: int
    raw: Any
    space: pypdfium2.PdfMatrix


def has_figures(page: pypdfium2.PdfPage) -> bool:
    """Whether a page shows a picture or a drawing, as far as its first objects tell."""
    import pypdfium2.raw as pdfium

    paper = Box(*page.get_bbox())
    least = SHARE * paper.area
    drawing: list[Box] = []  # of paths that go aslant, and of them together
    boxes = _Bars()
    segments = MOST_SEGMENTS
    for count, thing in enumerate(_things(page)):
        if count == MOST_OBJECTS or segments <= 0:
            return False
        if thing.kind == pdfium.FPDF_PAGEOBJ_TEXT:
            continue
        box = _box(thing).within(paper)
        if thing.kind != pdfium.FPDF_PAGEOBJ_PATH:
            if box.area >= least:
                return True
            continue
        aslant, looked_at = _aslant(thing, segments)
        segments -= looked_at
        if aslant >= FAR and box.area >= least:
            return True
        if aslant:
            drawing.append(box.around(drawing[-1]) if drawing else box)
            if len(drawing) >= MANY and drawing[-1].area >= least:
                return True
        elif min(box.width, box.height) >= THIN and boxes.add(box):
            return True
    return False


class _Bars:
    """Boxes of a page, by the line that they stand on and how thick they are."""

    def __init__(self) -> None:
        self._lengths: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)

    def add(self, box: Box) -> bool:
        """Add a box; whether it is a bar of a chart with those before."""
        width, height = round(box.width), round(box.height)
        upright = self._lengths["upright", round(box.bottom), width]
        lying = self._lengths["lying", round(box.left), height]
        upright.add(height)
        lying.add(width)
        return max(len(upright), len(lying)) >= BARS


def _things(page: pypdfium2.PdfPage) -> Iterator[_Thing]:
    """What is on a page, also in forms on it."""
    import pypdfium2
    import pypdfium2.raw as pdfium

    def inside(holder: Any, count: Any, get: Any, space: pypdfium2.PdfMatrix, depth: int) -> Iterator[_Thing]:
        for index in range(count(holder)):
            raw = get(holder, index)
            kind = pdfium.FPDFPageObj_GetType(raw)
            if kind != pdfium.FPDF_PAGEOBJ_FORM:
                yield _Thing(kind, raw, space)
            elif depth < DEPTH:
                form = pdfium.FPDFFormObj_CountObjects, pdfium.FPDFFormObj_GetObject
                yield from inside(raw, *form, _matrix(raw).multiply(space), depth + 1)

    yield from inside(page.raw, pdfium.FPDFPage_CountObjects, pdfium.FPDFPage_GetObject, pypdfium2.PdfMatrix(), 0)


def _matrix(raw: Any) -> pypdfium2.PdfMatrix:
    import pypdfium2
    import pypdfium2.raw as pdfium

    found = pdfium.FS_MATRIX()
    pdfium.FPDFPageObj_GetMatrix(raw, byref(found))
    return pypdfium2.PdfMatrix.from_raw(found)


def _box(thing: _Thing) -> Box:
    """Where on the page a thing is."""
    import pypdfium2.raw as pdfium

    sides = [c_float() for _ in range(4)]
    pdfium.FPDFPageObj_GetBounds(thing.raw, *map(byref, sides))
    return Box(*thing.space.on_rect(*(side.value for side in sides)))


def _aslant(thing: _Thing, most: int) -> tuple[float, int]:
    """How far a path goes both along and up the page, in points, and how many segments of at most `most` tell it."""
    import pypdfium2.raw as pdfium

    space = _matrix(thing.raw).multiply(thing.space)
    count = min(pdfium.FPDFPath_CountSegments(thing.raw), most)
    x, y = c_float(), c_float()
    aslant, before = 0.0, (0.0, 0.0)
    for index in range(count):
        segment = pdfium.FPDFPath_GetPathSegment(thing.raw, index)
        pdfium.FPDFPathSegment_GetPoint(segment, byref(x), byref(y))
        here = space.on_point(x.value, y.value)
        step = min(abs(here[0] - before[0]), abs(here[1] - before[1]))
        if step > ROUNDED and pdfium.FPDFPathSegment_GetType(segment) != pdfium.FPDF_SEGMENT_MOVETO:
            aslant += step
        before = here
    return aslant, count
