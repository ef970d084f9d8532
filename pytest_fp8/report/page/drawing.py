"""SVG by matplotlib in colours of the page's style sheet, so that one picture serves light, dark and paper."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

NAMES = ("ink", "faint", "bf16", "fp8", "band", "good", "bad")
"""Variables of the style sheet."""
COLOURS = tuple(f"#0a0b{index:02x}" for index in range(16, 16 + len(NAMES)))
"""Colours that no picture has by itself; each is replaced by a variable."""
INK, FAINT, BF16, FP8, BAND, GOOD, BAD = COLOURS
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, to be found and copied
    "svg.hashsalt": "pytest-fp8",
    "text.parse_math": False,  # a layer's name may hold a dollar
    "font.size": 9.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.0,
    "axes.titlecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
}

LONGEST_LEGEND = 50
"""Letters of a legend in one row."""
LEFT, RIGHT, BELOW, BETWEEN, OVER = 0.95, 0.1, 0.48, 0.3, 0.1
"""Inches beside, below, between and above panels, for tick labels of eight letters and two lines."""
LEGEND_ROW, WIDTH = 0.19, 5.6
"""Inches: of a row of a legend, and of a picture."""


@dataclass(frozen=True)
class Picture:
    title: str
    reads: str
    """How to read it, in one or two sentences."""
    svg: str
    data: str
    """Tab-separated numbers."""


@dataclass
class Drawing:
    """A picture that is being drawn: ``axes`` from the top; ``svg`` once it is done."""

    title: str
    axes: list[Any]
    svg: str = ""

    def picture(self, reads: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Picture:
        """``rows``: its numbers, to copy into a spreadsheet; nothing for ``None``."""
        texts = [
            ["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row]
            for row in rows
        ]
        lines = ("\t".join(re.sub("[\t\n]", " ", cell) for cell in row) for row in [head, *texts])
        return Picture(self.title, reads, self.svg, "\n".join(lines))


@contextmanager
def drawing(key: str, title: str, height: float, panels: int = 1, whole: bool = False) -> Iterator[Drawing]:
    """Draw in the block; a legend above each of the axes names what has a label, where it hides no point. ``key``: a
    prefix for ids, other for each picture of a page. ``whole``: what ``x`` counts, as steps."""
    import matplotlib as mpl
    import numpy as np
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}), np.errstate(all="ignore"):
        figure = Figure(figsize=(WIDTH, height))
        FigureCanvasSVG(figure)
        drawn = Drawing(title, [figure.add_subplot(panels, 1, index + 1) for index in range(panels)])
        yield drawn
        for axes in drawn.axes:
            if whole:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if labels := axes.get_legend_handles_labels()[1]:
                columns = _columns(labels)
                axes.legend(
                    loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, columnspacing=1.2
                )
        _place(drawn.axes, height)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn.svg = _for_the_page(text.getvalue(), key, title)


def _place(panels: Sequence[Any], height: float) -> None:
    """Put panels of one height below each other, each with room for its legend above. matplotlib's own layouts find out
    what fits by drawing all of it once more, and take twice as long."""
    named = [axes.get_legend_handles_labels()[1] for axes in panels]
    above = [OVER + LEGEND_ROW * math.ceil(len(labels) / _columns(labels)) for labels in named]
    tall = (height - BELOW - BETWEEN * (len(panels) - 1) - sum(above)) / len(panels)
    top = height
    for axes, room in zip(panels, above, strict=True):
        bottom = top - room - tall
        # Such as 1e-7: above the tick labels, and not over the legend.
        axes.yaxis.get_offset_text().set_ha("right")
        axes.set_position((LEFT / WIDTH, bottom / height, (WIDTH - LEFT - RIGHT) / WIDTH, tall / height))
        top = bottom - BETWEEN


def _columns(labels: Sequence[str]) -> int:
    """A longer row would be cut off at the picture's edge."""
    return 4 if sum(map(len, labels)) <= LONGEST_LEGEND else 2


def _for_the_page(svg: str, key: str, label: str) -> str:
    """The ``<svg>`` alone, with ids of its own, the page's colours, and as wide as there is room."""
    from html import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{key}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", svg)
    for colour, variable in zip(COLOURS, NAMES, strict=True):
        svg = svg.replace(colour, f"var(--{variable})")
    svg = re.sub(r' width="[^"]+pt" height="[^"]+pt"', "", svg, count=1)
    svg = re.sub(r' d="[^"]*"', _shorter, svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _shorter(path: re.Match[str]) -> str:
    """A path with two decimals: a hundredth of a point is less than anyone sees."""
    return " " + re.sub(r"(\.\d{2})\d+", r"\1", " ".join(path[0].split()))
