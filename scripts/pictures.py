"""Draw the pictures of the documentation into docs/images/, each for a light and a dark page.

    python scripts/pictures.py                        # all pictures: some minutes
    python scripts/pictures.py conditions benchmark   # some of them

Drawings are SVG files whose numbers are computed with the bundled models, or read from the tables
of docs/benchmarks.md. Screenshots show real pages in an installed Chromium, and need Pillow,
Playwright and the extras ``report`` and ``serve``. The same versions write the same drawings, byte
for byte.

This script alone defines the alternative texts. A drawing contains its text as its title, and the
script writes all of them into the pages that show the pictures.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import numpy as np
from common import Options
from numpy.typing import NDArray

import llmcond
from llmcond.base.files import replace_atomically
from llmcond.prompts import load_prompt

ROOT: Final = Path(__file__).resolve().parent.parent
TICKETS: Final = ROOT / "docs" / "tickets.csv"
TUTORIAL: Final = ROOT / "docs" / "tutorials" / "tickets.py"
IMAGES: Final = ROOT / "docs" / "images"
BENCHMARKS: Final = ROOT / "docs" / "benchmarks.md"

#: The colours of each theme. All but ``line`` are legible as text on ``paper`` and ``raised``.
THEMES: Final = {
    "light": {
        "paper": "#ffffff",
        "raised": "#f3f3f0",
        "ink": "#1c1d1f",
        "muted": "#5c5f66",
        "line": "#c9c8c2",
        "blue": "#0061a0",
        "orange": "#a34700",
        "green": "#006b4d",
    },
    "dark": {
        "paper": "#15171a",
        "raised": "#22262b",
        "ink": "#e9e8e4",
        "muted": "#a9acb3",
        "line": "#474c54",
        "blue": "#7cc1f2",
        "orange": "#f4a261",
        "green": "#4fcfa5",
    },
}

#: The width of a drawing. A phone shows it at three fifths, so that 17 becomes 10 pixels.
WIDTH: Final = 600
_SIZE: Final = 18
_SMALL: Final = 17

PAIR: Final = ("Two women read a book at the beach.", "Two women cook at night.")
CONDITIONS: Final = ("the number of people", "the activity", "the place")
#: The words of both sentences, each with the condition that it answers.
_WORDS: Final = (
    ((("Two women ", 0), ("read a book", 1)), (("at the beach.", 2),)),
    ((("Two women ", 0), ("cook", 1)), (("at night.", None),)),
)
_HUES: Final = ("blue", "orange", "green")

EXPLAINED: Final = "A man is snowboarding down a hill."
ASPECTS: Final = ("the sport", "the gender of the person")


# -- drawing -----------------------------------------------------------------------------------


class Sheet:
    """A drawing in one theme, to which shapes and texts are added."""

    def __init__(self, theme: str, height: int, alternative: str) -> None:
        """Begin a drawing of ``WIDTH`` with a background.

        Args:
            theme: the name of its colours in ``THEMES``.
            height: the height, in the unit of ``WIDTH``.
            alternative: the alternative text.
        """
        self.colours = THEMES[theme]
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" font-family="system-ui, sans-serif" '
            f'font-size="{_SIZE}">',
            f"<title>{escape(alternative)}</title>",
        ]
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "paper", "line", radius=12)

    def colour(self, name: str) -> str:
        """Return a colour of the theme by its name; any other value is itself."""
        return self.colours.get(name, name)

    def tint(self, name: str, share: float) -> str:
        """Return a mixture of a colour of the theme with its paper."""
        pairs = zip(_parts(self.colours["paper"]), _parts(self.colour(name)), strict=True)
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)

    def _add(self, kind: str, content: str | None = None, /, **attributes: str | float) -> None:
        """Add an element whose attributes are colours, other words, and coordinates."""
        words = [kind]
        for name, value in attributes.items():
            text = self.colour(value) if isinstance(value, str) else _number(value)
            words += [f'{name.replace("_", "-")}="{text}"'] if value else []
        start = " ".join(words)
        self._lines.append(f"<{start}/>" if content is None else f"<{start}>{content}</{kind}>")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        stroke: str = "",
        radius: float = 0,
    ) -> None:
        """Add a rectangle."""
        size = {"width": width, "height": height}
        self._add("rect", x=x, y=y, **size, rx=radius, fill=fill, stroke=stroke)

    def text(
        self,
        x: float,
        y: float,
        *parts: str | tuple[str, str],
        size: float = 0,
        fill: str = "ink",
        anchor: str = "",
        bold: bool = False,
    ) -> None:
        """Add a line of text; a part may have a colour of its own."""
        content = "".join(
            escape(part)
            if isinstance(part, str)
            else f'<tspan fill="{self.colour(part[1])}">{escape(part[0])}</tspan>'
            for part in parts
        )
        style: dict[str, Any] = {"font_size": size, "text_anchor": anchor}
        style |= {"font_weight": "bold" * bold, "xml:space": "preserve"}
        self._add("text", content, x=x, y=y, fill=fill, **style)

    def path(self, data: str, stroke: str, width: float = 1.5) -> None:
        """Add a path."""
        line: dict[str, Any] = {"stroke": stroke, "stroke_width": width}
        line |= {"stroke_linecap": "round", "stroke_linejoin": "round"}
        self._add("path", d=data, fill="none", **line)

    def arrow(self, x: float, top: float, bottom: float) -> None:
        """Add an arrow that points down."""
        head = f"M{_number(x - 5)} {_number(bottom - 6)}l5 6 5-6"
        self.path(f"M{_number(x)} {_number(top)}V{_number(bottom)}{head}", "muted")

    def svg(self) -> str:
        """Return the drawing as a file."""
        return "\n".join([*self._lines, "</svg>", ""])


class Picture(NamedTuple):
    """A picture for any theme.

    Attributes:
        alternative: The alternative text.
        height: The height of the drawing.
        draw: The function that adds everything to an empty sheet.
    """

    alternative: str
    height: int
    draw: Callable[[Sheet], None]

    def svg(self, theme: str) -> str:
        """Return the drawing in a theme, as a file."""
        sheet = Sheet(theme, self.height, self.alternative)
        self.draw(sheet)
        return sheet.svg()


def _number(value: float) -> str:
    """Return a coordinate with one decimal place at most."""
    return f"{round(float(value), 1):g}"


def _parts(colour: str) -> tuple[int, ...]:
    """Return red, green and blue of a colour, from 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))


# -- one pair under three conditions -----------------------------------------------------------


@cache
def _embedder() -> llmcond.Embedder:
    return llmcond.load_embedder("minilm-conditions", device="cpu")


@cache
def _encoder() -> llmcond.Encoder:
    return llmcond.load_encoder("minilm", dtype="float32", device="cpu", pool_over="text")


def draw_conditions() -> Picture:
    """Draw the similarities of one pair of sentences, without and under conditions."""
    plain = llmcond.load_encoder("minilm", dtype="float32", device="cpu")
    first, second = plain.encode([llmcond.EncoderInput("", sentence) for sentence in PAIR])
    alone = float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))
    values = [_embedder().similarity(*PAIR, condition) for condition in CONDITIONS]
    listed = ", ".join(
        f"{value:.2f} under “{condition}”"
        for condition, value in zip(CONDITIONS, values, strict=True)
    )
    alternative = (
        f"Similarity of “{PAIR[0][:-1]}” and “{PAIR[1][:-1]}”. A plain sentence embedding "
        f"gives one number, {alone:.2f}. llmcond gives one for each condition: {listed}."
    )

    def draw(sheet: Sheet) -> None:
        for x, lines in zip((20, 305), _WORDS, strict=True):
            sheet.box(x, 20, 275, 76, "raised", radius=8)
            for y, line in zip((52, 78), lines, strict=True):
                hues = ["ink" if i is None else _HUES[i] for _, i in line]
                words = [(word, hue) for (word, _), hue in zip(line, hues, strict=True)]
                sheet.text(x + 16, y, *words, bold=True)
        sheet.text(20, 134, "A plain embedding: one similarity", size=_SMALL, fill="muted")
        _bar(sheet, 146, "of the whole texts", alone, "muted")
        sheet.path(f"M20 200H{WIDTH - 20}", "line", 1)
        heading = "llmcond: one similarity for each condition"
        sheet.text(20, 232, heading, size=_SMALL, fill="muted")
        for i, (condition, value) in enumerate(zip(CONDITIONS, values, strict=True)):
            _bar(sheet, 244 + 42 * i, condition, value, _HUES[i])

    return Picture(alternative, 384, draw)


def _bar(sheet: Sheet, y: float, label: str, value: float, hue: str) -> None:
    """Draw a similarity from 0 to 1 as a bar, between its label and its number."""
    left, width = 250, 266
    sheet.text(20, y + 23, label, fill="ink" if hue == "muted" else hue, bold=hue != "muted")
    sheet.box(left, y + 8, width, 20, "raised", radius=4)
    sheet.box(left, y + 8, width * max(0.0, value), 20, hue, radius=4)
    sheet.text(WIDTH - 20, y + 24, f"{value:.2f}", size=20, anchor="end", bold=True)


# -- from a sentence and a condition to a vector -----------------------------------------------


class Shaded(NamedTuple):
    """A token with its value.

    Attributes:
        text: The characters of the sentence that the token has.
        value: Its value.
        continues: Whether it continues the word of the token before it.
    """

    text: str
    value: float
    continues: bool


@cache
def routed_weights(sentence: str, condition: str) -> list[Shaded]:
    """Return the weights of a sentence's tokens in routed pooling, without special tokens."""
    item = load_prompt("routed").conditional.render(sentence, condition)
    weighted = _encoder().token_weights(item)
    return _shade(sentence, weighted.tokens, weighted.weights[0])


def moved_by_tokens(sentence: str, condition: str) -> list[Shaded]:
    """Return how far the bundled model's embedding moves without each token of a sentence."""
    explanation = _embedder().explain(sentence, condition)
    assert explanation.method == "leave-one-out"
    (explained,) = explanation.conditions
    return _shade(sentence, explained.tokens, explained.values)


def _shade(sentence: str, tokens: Sequence[Any], values: NDArray[Any]) -> list[Shaded]:
    pairs = [pair for pair in zip(tokens, values, strict=True) if pair[0].start is not None]
    ends = [0, *(token.end for token, _ in pairs)]
    return [
        Shaded(sentence[token.start : token.end], float(value), 0 < token.start == end)
        for (token, value), end in zip(pairs, ends, strict=False)
    ]


def _highest(tokens: Sequence[Shaded]) -> Shaded:
    return max(tokens, key=lambda token: token.value)


def draw_vector() -> Picture:
    """Draw how a sentence and a condition become a vector."""
    condition = ASPECTS[0]
    tokens = routed_weights(EXPLAINED, condition)
    top = _highest(tokens)
    alternative = (
        f"How a sentence s and a condition c, “{condition}”, become a vector. The encoder f reads "
        "both as one text (joint prompt), or separately (routed pooling). With routed pooling, the "
        f"condition weights the sentence's tokens: “{top.text}” has the largest weight, "
        f"{top.value:.2f}. Then the vector of the condition alone is subtracted. A head g maps the "
        "difference to the embedding, which is compared by its cosine."
    )

    def draw(sheet: Sheet) -> None:
        _draw_input(sheet, 20, 350, "sentence s", EXPLAINED, "blue")
        _draw_input(sheet, 390, 190, "condition c", condition, "orange")
        sheet.path("M195 88V106M485 88V106M155 106H485", "muted")
        ways = (
            (155, "Joint prompt", "encoder f reads one text:", "f(c; I(s))", "− f(c; I(∅))"),
            (445, "Routed pooling", "c weights the tokens of s:", "r(s, c) = Σ wᵢ hᵢ", "− e(c)"),
        )
        sheet.box(20, 446, 560, 68, "raised", radius=8)
        for middle, title, note, features, subtracted in ways:
            sheet.arrow(middle, 106, 130)
            sheet.box(middle - 135, 132, 270, 284, "paper", "line", radius=8)
            sheet.text(middle, 162, title, anchor="middle", bold=True)
            sheet.text(middle, 188, note, size=_SMALL, fill="muted", anchor="middle")
            sheet.text(middle, 398, features, size=20, anchor="middle", bold=True)
            sheet.arrow(middle, 416, 444)
            sheet.text(middle, 500, subtracted, anchor="middle")
        _chip(sheet, 155, 236, 238, (condition,), "orange")
        _chip(sheet, 155, 276, 238, ("A man is snowboarding", "down a hill."), "blue")
        _shaded_lines(sheet, tokens, 322, 206, 246, is_centred=True)
        sheet.text(300, 473, "Subtract the condition alone", anchor="middle", bold=True)
        sheet.arrow(300, 514, 542)
        sheet.box(20, 544, 560, 64, "raised", radius=8)
        sheet.text(300, 571, "Head g", anchor="middle", bold=True)
        note = "fitted on ratings, or left out"
        sheet.text(300, 595, note, size=_SMALL, fill="muted", anchor="middle")
        sheet.arrow(300, 608, 636)
        sheet.box(20, 638, 560, 108, sheet.tint("green", 0.12), "green", radius=8)
        formula = "CASE(s, c) = g( f(c; I(s)) − f(c; I(∅)) )"
        sheet.text(300, 672, formula, size=20, anchor="middle", bold=True)
        sheet.text(300, 700, "or g( r(s, c) − e(c) ) with routed pooling", anchor="middle")
        note = "compared by its cosine, under one condition"
        sheet.text(300, 728, note, size=_SMALL, anchor="middle")

    return Picture(alternative, 766, draw)


def _draw_input(sheet: Sheet, x: float, width: float, name: str, text: str, hue: str) -> None:
    """Draw an input with its name."""
    sheet.box(x, 20, width, 68, sheet.tint(hue, 0.12), hue, radius=8)
    sheet.text(x + 14, 45, name, size=_SMALL, fill=hue, bold=True)
    sheet.text(x + 14, 72, text)


def _chip(
    sheet: Sheet, middle: float, y: float, width: float, lines: Sequence[str], hue: str
) -> None:
    sheet.box(
        middle - width / 2, y, width, 12 + 24 * len(lines), sheet.tint(hue, 0.12), hue, radius=6
    )
    for i, line in enumerate(lines):
        sheet.text(middle, y + 24 + 24 * i, line, anchor="middle")


# -- tokens ------------------------------------------------------------------------------------

#: The height of a shaded token, and the space between words.
_TOKEN_HEIGHT: Final = 48
_SPACE: Final = 5


def _shaded_lines(
    sheet: Sheet,
    tokens: Sequence[Shaded],
    left: float,
    top: float,
    width: float,
    is_centred: bool = False,
) -> float:
    """Draw tokens, shaded by their values, in lines; return the position below them."""
    highest = _highest(tokens).value
    for line in _break_lines(tokens, width):
        x = left + (width - _line_width(line)) / 2 * is_centred
        for word in line:
            for token in word:
                share = round(max(0.0, token.value) / highest, 2)
                fill = sheet.tint("blue", 0.06 + 0.94 * share)
                # Black or white, whichever has the higher contrast.
                brightness = np.dot(_parts(fill), (0.299, 0.587, 0.114))
                ink = "#000000" if brightness > 117 else "#ffffff"
                sheet.box(x, top, _token_width(token), _TOKEN_HEIGHT, fill, radius=4)
                middle = x + _token_width(token) / 2
                sheet.text(middle, top + 21, token.text, fill=ink, anchor="middle")
                number = f"{token.value:.2f}"
                sheet.text(middle, top + 41, number, size=16, fill=ink, anchor="middle")
                x += _token_width(token)
            x += _SPACE
        top += _TOKEN_HEIGHT + _SPACE
    return top


def _token_width(token: Shaded) -> float:
    return max(11.2 * len(token.text) + 14, 44.0)


def _line_width(line: Sequence[Sequence[Shaded]]) -> float:
    spaces = _SPACE * (len(line) - 1)
    return sum(_token_width(token) for word in line for token in word) + spaces


def _break_lines(tokens: Sequence[Shaded], width: float) -> list[list[list[Shaded]]]:
    """Return the lines of a sentence, as lists of words, which are lists of tokens."""
    words: list[list[Shaded]] = []
    for token in tokens:
        if not token.continues:
            words.append([])
        words[-1].append(token)
    lines: list[list[list[Shaded]]] = [[]]
    for word in words:
        if lines[-1] and _line_width([*lines[-1], word]) > width:
            lines.append([])
        lines[-1].append(word)
    return lines


def draw_tokens(
    title: str, beginning: str, values_of: Callable[[str, str], list[Shaded]]
) -> Picture:
    """Draw the tokens of a sentence under two conditions, shaded by their values.

    Args:
        title: The heading of the drawing.
        beginning: The first sentence of the alternative text.
        values_of: The function from a sentence and a condition to the values of tokens.
    """
    rows = [(condition, values_of(EXPLAINED, condition)) for condition in ASPECTS]
    highest = (
        " and ".join(
            f"“{token.text}” {token.value:.2f}"
            for token in sorted(tokens, key=lambda token: -token.value)[:2]
        )
        + f" under “{condition}”"
        for condition, tokens in rows
    )
    alternative = f"{beginning} The largest values are {', and '.join(highest)}."

    def draw(sheet: Sheet) -> None:
        sheet.text(20, 40, title, size=_SMALL, fill="muted")
        top = 56.0
        for condition, tokens in rows:
            sheet.text(20, top + 20, condition, fill="orange", bold=True)
            top = _shaded_lines(sheet, tokens, 20, top + 34, WIDTH - 40) + 14

    return Picture(alternative, 258, draw)


# -- a map of clusters -------------------------------------------------------------------------

#: The conditions of both panels, each with the column of the tickets that it asks for.
PANELS: Final = (("the product", "product"), ("the sentiment", "sentiment"))
_MARKS: Final = {"negative": "orange", "neutral": "muted", "positive": "blue"}
_PANEL: Final = 275
_TURNS: Final = 8


def draw_clusters() -> Picture:
    """Draw maps of the same support tickets under two conditions."""
    from llmcond.clustering import compute_maps

    with TICKETS.open(encoding="utf-8", newline="") as file:
        tickets = list(csv.DictReader(file))
    texts = [ticket["text"] for ticket in tickets]
    vectors = [_embedder().encode(texts, condition) for condition, _ in PANELS]
    shares = [
        [_percent_nearest(points, [ticket[column] for ticket in tickets]) for _, column in PANELS]
        for points in vectors
    ]
    maps = compute_maps(vectors, seed=0)
    alternative = (
        f"Two maps of the same {len(tickets)} support tickets. Under “the product”, they form five "
        "groups: kettles, headphones, printers, tents and blenders. Of the nearest tickets, "
        f"{shares[0][0]} have the same product, and {shares[0][1]} the same sentiment. "
        "Under “the sentiment”, they form other groups: "
        f"{shares[1][0]} have the same product, and {shares[1][1]} the same sentiment."
    )

    def draw(sheet: Sheet) -> None:
        for i, (condition, _) in enumerate(PANELS):
            left = 20 + (_PANEL + 10) * i
            sheet.text(left + _PANEL / 2, 42, condition, anchor="middle", bold=True)
            sheet.box(left, 56, _PANEL, _PANEL, "raised", radius=8)
            points = _fit_panel(maps[i], left, 56)
            # Points are added in turns, so that no sentiment covers the others.
            turns = np.random.default_rng(0).integers(_TURNS, size=len(tickets))
            for turn, (value, hue) in product(range(_TURNS), _MARKS.items()):
                members = [ticket["sentiment"] == value for ticket in tickets]
                _mark(sheet, points[(turns == turn) & members], value, hue)
        points = _fit_panel(maps[0], 20, 56)
        for name in sorted({ticket["product"] for ticket in tickets}):
            group = points[[ticket["product"] == name for ticket in tickets]]
            x = float(np.clip(group[:, 0].mean(), 82, 20 + _PANEL - 62))
            sheet.text(x, group[:, 1].min() - 10, name, size=_SMALL, anchor="middle")
        for x, (value, hue) in zip((80, 250, 420), _MARKS.items(), strict=True):
            _mark(sheet, np.array([[x, 356.0]]), value, hue)
            sheet.text(x + 12, 362, value, size=_SMALL)

    return Picture(alternative, 384, draw)


#: The condition of both panels of the picture about ignoring, and the mark of each problem.
_PROBLEM: Final = "the problem | the complaint | what is wrong"
_IGNORED: Final = "the product"
_PROBLEM_MARKS: Final = {
    "billing": ("orange", "negative"),
    "defect": ("muted", "neutral"),
    "delivery": ("blue", "positive"),
    "return": ("green", "triangle"),
}


def draw_ignoring() -> Picture:
    """Draw maps of the tutorial's tickets by problem, before and after the product is ignored."""
    from sklearn.metrics import v_measure_score

    from llmcond.clustering import compute_maps
    from llmcond.evaluation.analyses import kmeans

    tutorial = TUTORIAL.read_text(encoding="utf-8")
    table = tutorial.partition('TICKETS = """\\\n')[2].partition('"""')[0]
    tickets = list(csv.DictReader(table.splitlines()))
    texts = [ticket["text"] for ticket in tickets]
    problems = [ticket["problem"] for ticket in tickets]
    condition = llmcond.Condition(_PROBLEM, ignore=[_IGNORED])
    vectors = [
        _embedder().encode(texts, _PROBLEM),
        _embedder().ignoring(texts, condition).encode(texts, condition),
    ]
    scores = [
        f"{100 * v_measure_score(problems, kmeans(points, len(_PROBLEM_MARKS), 0)):.0f}"
        for points in vectors
    ]
    maps = compute_maps(vectors, seed=0)
    alternative = (
        f"Two maps of the same {len(tickets)} support tickets under “{_PROBLEM}”, marked by "
        f"problem. Before, four clusters have a V-measure of {scores[0]}. With --ignore "
        f"“{_IGNORED}”, tickets with the same problem are closer together, though returns and "
        f"deliveries still mix, and the V-measure is {scores[1]}."
    )

    def draw(sheet: Sheet) -> None:
        sheet.text(WIDTH / 2, 36, _PROBLEM, anchor="middle", bold=True)
        titles = ("nothing ignored", f"ignoring {_IGNORED}")
        for i, (title, score) in enumerate(zip(titles, scores, strict=True)):
            left = 20 + (_PANEL + 10) * i
            sheet.text(left + _PANEL / 2, 64, title, anchor="middle", size=_SMALL)
            sheet.box(left, 78, _PANEL, _PANEL, "raised", radius=8)
            points = _fit_panel(maps[i], left, 78)
            turns = np.random.default_rng(0).integers(_TURNS, size=len(tickets))
            for turn, (value, mark) in product(range(_TURNS), _PROBLEM_MARKS.items()):
                members = [problem == value for problem in problems]
                _mark(sheet, points[(turns == turn) & members], mark[1], mark[0])
            note = f"V-measure {score}"
            sheet.text(left + 14, 102, note, size=_SMALL, fill="muted")
        for x, (value, (hue, shape)) in zip(
            (60, 190, 310, 450), _PROBLEM_MARKS.items(), strict=True
        ):
            _mark(sheet, np.array([[x, 378.0]]), shape, hue)
            sheet.text(x + 12, 384, value, size=_SMALL)

    return Picture(alternative, 406, draw)


def _percent_nearest(vectors: NDArray[np.float32], labels: Sequence[str]) -> str:
    """Return the percentage of texts whose nearest other text has the same label."""
    cosines = vectors @ vectors.T  # embeddings have unit length
    np.fill_diagonal(cosines, -np.inf)
    same = np.array(labels)[cosines.argmax(axis=1)] == np.array(labels)
    return f"{100 * same.mean():.0f} %"


def _fit_panel(points: NDArray[np.float64], left: float, top: float) -> NDArray[np.float64]:
    """Scale the positions of a map to its panel, with space for a label above each group."""
    low, high = points.min(axis=0), points.max(axis=0)
    space = np.array([_PANEL - 40.0, _PANEL - 64.0])
    scaled = (points - low) / (high - low) * space
    return np.asarray(scaled + np.array([left + 20, top + 40]))


def _mark(sheet: Sheet, points: NDArray[np.float64], value: str, hue: str) -> None:
    """Draw points, with another shape for each sentiment or problem."""
    shape = {
        "negative": "m-3-3l6 6m0-6l-6 6",
        "neutral": "h0",
        "positive": "m-3.5 0h7m-3.5-3.5v7",
        "triangle": "m0-3.5l3.5 6.5h-7z",
    }
    width = 5.5 if value == "neutral" else 2
    data = "".join(f"M{_number(x)} {_number(y)}{shape[value]}" for x, y in points)
    sheet.path(data, hue, width)


# -- a chart of a benchmark --------------------------------------------------------------------

#: The heading above the table, and the systems of each number type that the chart shows.
_TABLE: Final = "MiniLM, 2,000 inputs of C-STS, two threads:"
_SYSTEMS: Final = {
    "bfloat16": ("sentence-transformers", "OpenVINO", "ONNX Runtime, int8", "llmcond"),
    "float32": ("sentence-transformers", "OpenVINO", "ONNX Runtime", "llmcond"),
}


def read_benchmark() -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of the table, as texts by heading, under their number type and system."""
    table = BENCHMARKS.read_text(encoding="utf-8").split(_TABLE)[1].strip().split("\n\n")[0]
    cells = [
        [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        for line in table.splitlines()
    ]
    rows, dtype = {}, ""
    for line in cells[2:]:
        if any(line[1:]):
            rows[dtype, line[0]] = dict(zip(cells[0], line, strict=True))
        else:
            dtype = line[0]
    return rows


def draw_benchmark() -> Picture:
    """Draw the speed of extraction next to that of other libraries."""
    table = read_benchmark()
    speeds = {
        dtype: {name: table[dtype, name]["tokens/s"] for name in names}
        for dtype, names in _SYSTEMS.items()
    }
    cosine = table["bfloat16", "ONNX Runtime, int8"]["least cosine"]
    listed = (
        f"In {dtype}: " + ", ".join(f"{name} {speed}" for name, speed in of_systems.items())
        for dtype, of_systems in speeds.items()
    )
    alternative = (
        f"Tokens per second of MiniLM on two CPU cores. {'. '.join(listed)}. The int8 vectors of "
        f"ONNX Runtime have a cosine as low as {float(cosine):.2f} with the others."
    )
    fastest = max(_integer(speed) for row in speeds.values() for speed in row.values())

    def draw(sheet: Sheet) -> None:
        sheet.text(20, 42, "MiniLM on two CPU cores: tokens per second", bold=True)
        top = 62.0
        for dtype, of_systems in speeds.items():
            sheet.text(20, top + 20, dtype, size=_SMALL, fill="muted")
            top += 30
            for name, speed in of_systems.items():
                is_ours = name == "llmcond"
                hue = "blue" if is_ours else sheet.tint("muted", 0.7)
                label = f"{name} *" if "int8" in name else name
                sheet.text(20, top + 21, label, fill="blue" if is_ours else "ink", bold=is_ours)
                width = 256 * _integer(speed) / fastest
                sheet.box(246, top + 4, width, 24, hue, radius=4)
                sheet.text(254 + width, top + 22, speed, bold=is_ours)
                top += 34
            top += 12
        sheet.text(
            20,
            top + 12,
            f"* 8-bit weights: vectors differ, with cosines down to {float(cosine):.2f}",
            size=_SMALL,
            fill="muted",
        )

    return Picture(alternative, 456, draw)


def _integer(text: str) -> int:
    return int(text.replace(",", ""))


# -- screenshots -------------------------------------------------------------------------------

#: The width of pages in screenshots, and the number of image pixels for each of their pixels.
_PAGE_WIDTH: Final = 760
_RATIO: Final = 1.5


class Screenshot(NamedTuple):
    """A screenshot of a real page.

    Attributes:
        alternative: The alternative text.
        end: The selector of the element at the end of the shown part, which begins at the top.
        commands: The commands that write page.html; without any, it is the page of the server.
        prepare: The function that brings the page in a browser to the state that is shown.
    """

    alternative: str
    end: str
    commands: Sequence[str]
    prepare: Callable[[Any], None]


@contextmanager
def open_page(commands: Sequence[str], folder: Path) -> Iterator[str]:
    """Make the page of a screenshot in an empty folder, and yield its URL."""
    llmcond_command = [sys.executable, "-m", "llmcond"]
    for line in commands:
        command = [*llmcond_command, *shlex.split(line)]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    if commands:
        yield (folder / "page.html").as_uri()
        return
    command = [*llmcond_command, "serve", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if match := re.search(r"http://[\d.]+:\d+", line):
                yield match[0]
                return
        raise RuntimeError("".join(lines))
    finally:
        server.terminate()
        server.wait()


def _select_text(tab: Any) -> None:
    tab.locator("#canvas").press("ArrowRight")
    tab.wait_for_function("document.getElementById('text').innerText.length > 1")


def _compare_texts(tab: Any) -> None:
    form = tab.locator("#similarity")
    for label, text in zip(("First text", "Second text"), PAIR, strict=True):
        form.get_by_label(label).fill(text)
    form.get_by_label("Conditions").fill("\n".join(CONDITIONS))
    form.get_by_role("button").click()
    form.locator("tbody tr").nth(2).wait_for()


SCREENSHOTS: Final = {
    "comparison-page": Screenshot(
        "The report of a comparison of three systems on the bundled sample. By its verdict, the "
        "MLP is better than zero-shot embeddings. A chart shows Spearman correlations × 100 with "
        "their intervals: about 91 for the MLP, 71 for the linear head, and 38 for zero-shot.",
        "figure",
        [
            "extract --model minilm --run run",
            "fit-head --head linear --dim 256 --run run",
            "fit-head --head mlp --dim 256 --run run",
            "compare run:none run:linear run:mlp --split dev --report page.html",
        ],
        lambda tab: tab.wait_for_function(
            "[...document.querySelectorAll('[data-chart]')].every(box => box.querySelector('svg'))"
        ),
    ),
    "clusters-page": Screenshot(
        "The page of clusters: a map of 360 support tickets under the condition “the product”, "
        "coloured by cluster. Buttons switch between two conditions, and a list names the five "
        "clusters.",
        ".read",
        [
            f"cluster '{TICKETS}' --report page.html --condition 'the product' "
            "--condition 'the sentiment'",
        ],
        _select_text,
    ),
    "server-page": Screenshot(
        "The page of the server: a form with two texts and three conditions. Below are "
        "similarities: 0.966 for the number of people, 0.299 for the activity, 0.472 for the "
        "place.",
        "#similarity",
        [],
        _compare_texts,
    ),
}


def take_screenshots(name: str) -> None:
    """Write a page as an image, in both themes."""
    from PIL import Image, ImageOps
    from playwright.sync_api import sync_playwright

    screenshot = SCREENSHOTS[name]
    with (
        tempfile.TemporaryDirectory() as folder,
        open_page(screenshot.commands, Path(folder)) as url,
        sync_playwright() as playwright,
    ):
        names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        program = next(filter(None, map(shutil.which, names)), None)
        browser = playwright.chromium.launch(executable_path=program)
        for theme in THEMES:
            tab = browser.new_page(
                viewport={"width": _PAGE_WIDTH, "height": 800},
                device_scale_factor=_RATIO,
                color_scheme="dark" if theme == "dark" else "light",
            )
            tab.goto(url)
            screenshot.prepare(tab)
            end = tab.locator(screenshot.end).first.evaluate(
                "element => element.getBoundingClientRect().bottom + scrollY"
            )
            clip: Any = {"x": 0, "y": 0, "width": _PAGE_WIDTH, "height": math.ceil(end) + 16}
            image: Any = Image.open(io.BytesIO(tab.screenshot(clip=clip, full_page=True)))
            # Without a border, a screenshot would look like a part of the page that shows it.
            image = ImageOps.expand(image.convert("RGB"), 2, THEMES[theme]["line"])
            with replace_atomically(picture_path(name, theme)) as temporary:
                image.save(temporary, format="WEBP", lossless=True, method=6)


# -- files and pages ---------------------------------------------------------------------------

#: The function that draws each picture.
DRAWINGS: Final[dict[str, Callable[[], Picture]]] = {
    "conditions": draw_conditions,
    "vector": draw_vector,
    "tokens": partial(
        draw_tokens,
        "How far the embedding moves without each token",
        "Tokens shaded by how far the bundled model's embedding moves without them.",
        moved_by_tokens,
    ),
    "weights": partial(
        draw_tokens,
        "The weight of each token's state in routed pooling",
        "Tokens shaded by their weights in routed pooling.",
        routed_weights,
    ),
    "clusters": draw_clusters,
    "ignoring": draw_ignoring,
    "benchmark": draw_benchmark,
}
NAMES: Final = (*DRAWINGS, *SCREENSHOTS)


def picture_path(name: str, theme: str) -> Path:
    """Return the file of a picture in a theme."""
    return IMAGES / f"{name}-{theme}.{'webp' if name in SCREENSHOTS else 'svg'}"


def alternative_text(name: str) -> str:
    """Return the alternative text of a picture: a screenshot's, or the title of a drawing."""
    if name in SCREENSHOTS:
        return SCREENSHOTS[name].alternative
    root = ElementTree.parse(picture_path(name, "light")).getroot()  # noqa: S314 - a file of this script
    return root.findtext("{*}title") or ""


def write_alternative_text(name: str) -> None:
    """Write the alternative text of a picture into all pages that show it.

    A text that is right but broken into lines stays as it is.
    """
    text, file = alternative_text(name), rf"[^)\"]*images/{name}-(?:light|dark)\."

    def replace(match: re.Match[str]) -> str:
        is_right = " ".join(match[2].split()) == text
        return match[0] if is_right else f"{match[1]}{text}{match[3]}"

    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = re.sub(rf"(!\[)([^]]*)(\]\({file})", replace, before)
        after = re.sub(rf'(alt=")([^"]*)(" src="{file})', replace, after)
        if after != before:
            page.write_text(after, encoding="utf-8")


def main() -> None:
    """Parse the command line, and write the pictures."""
    parser = Options(__doc__)
    parser.names("names", "pictures to write", NAMES)
    names = parser.parse_args().names or NAMES
    IMAGES.mkdir(exist_ok=True)
    for name in names:
        if name in SCREENSHOTS:
            take_screenshots(name)
        else:
            picture = DRAWINGS[name]()
            for theme in THEMES:
                with replace_atomically(picture_path(name, theme)) as temporary:
                    temporary.write_text(picture.svg(theme), encoding="utf-8")
        write_alternative_text(name)
        for theme in THEMES:
            path = picture_path(name, theme)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
