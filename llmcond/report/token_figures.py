"""Figures of tokens, shaded by their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmcond.errors import escape_control_characters
from llmcond.report.figures import COLOURS, draw_figure, wrap_text

# The width of a figure of tokens and of its labels, the height of a line, the space around the text
# of a token, and the space between words, in inches.
_TOKENS_WIDTH, _LABEL_WIDTH, _LINE_HEIGHT = 9.0, 2.0, 0.5
_TOKEN_PADDING, _WORD_SPACE = 0.05, 0.05

# Longer tokens are cut.
_MAX_TOKEN = 40


class ShadedToken(NamedTuple):
    """A token of a figure.

    Attributes:
        text: the token.
        number: its value, which is written below it.
        share: its value as a share of the largest one, from -1 to 1; it decides the shade.
        special: whether it is no part of the sentence.
        continues: whether it continues the word of the token before it.
    """

    text: str
    number: str
    share: float
    special: bool
    continues: bool


class TokenRow(NamedTuple):
    """The tokens of a sentence in a figure, with the row's title and a detail below it."""

    title: str
    detail: str
    tokens: Sequence[ShadedToken]


def plot_tokens(
    rows: Sequence[TokenRow],
    path: Path,
    caption: str,
    columns: Sequence[str],
    data: Iterable[Sequence[object]],
) -> None:
    """Plot the tokens of sentences, shaded by their values (CSR, figures 5 to 7).

    Args:
        rows: the tokens of each sentence.
        path: the .png, .svg or .pdf file to write.
        caption: the text below the rows.
        columns: the headings of the data, which are also written as CSV; see ``data_path``.
        data: the data.

    Raises:
        UserError: matplotlib is not installed.
    """
    with draw_figure(path, (_TOKENS_WIDTH, 1.0), columns, data) as figure:
        # Tokens are placed by their widths, without axes.
        figure.set_layout_engine("none")
        measure, top = _measurer(figure), 0.1
        for row in rows:
            label = f"{wrap_text(row.title, 24)}\n{wrap_text(row.detail, 28)}".rstrip()
            text = _add_text(figure, label, 0.1, top + 0.08, fontsize="small", va="top")
            below_label = top + measure(text)[1] + 0.16
            top = max(_add_tokens(figure, row.tokens, top, measure), below_label) + 0.1
        text = _add_text(
            figure, wrap_text(caption, 120), 0.1, top + 0.05, fontsize="small", va="top"
        )
        figure.set_size_inches(_TOKENS_WIDTH, top + measure(text)[1] + 0.15)


def _measurer(figure: Any) -> Callable[[Any], tuple[float, float]]:
    """Return a function that measures the width and the height of a text in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Creating a renderer for each text would take most of the time.
    renderer = FigureCanvasAgg(figure).get_renderer()

    def measure(text: Any) -> tuple[float, float]:
        extent = text.get_window_extent(renderer)
        return extent.width / figure.dpi, extent.height / figure.dpi

    return measure


def _add_text(figure: Any, text: str, x: float, y: float, **style: Any) -> Any:
    """Put a text at a position in inches, where y is the distance from the figure's top."""
    return figure.text(x, -y, text, transform=_from_top(figure), **style)


def _from_top(figure: Any) -> Any:
    """Return the transformation of inches from the top left corner, which may still move."""
    from matplotlib.transforms import ScaledTranslation

    return figure.dpi_scale_trans + ScaledTranslation(0, 1, figure.transFigure)


def _add_tokens(
    figure: Any,
    tokens: Sequence[ShadedToken],
    top: float,
    measure: Callable[[Any], tuple[float, float]],
) -> float:
    """Put tokens into lines that begin at ``top``; return the position below the last line."""
    from matplotlib.patches import Rectangle

    x, line = _LABEL_WIDTH, top
    for token in tokens:
        text = token.text if len(token.text) <= _MAX_TOKEN else f"{token.text[:_MAX_TOKEN]}…"
        colour = _blend(token.share)
        strong = abs(token.share) > 0.65
        style = {"ha": "center", "va": "center", "color": "white" if strong else "black"}
        label = _add_text(
            figure,
            escape_control_characters(text).replace("\n", "\\n").replace("$", r"\$"),
            0.0,
            line + 0.16,
            **style,
            **({"style": "italic", "fontsize": "small"} if token.special else {}),
        )
        number = _add_text(figure, token.number, 0.0, line + 0.35, fontsize=7, **style)
        width = max(measure(label)[0], measure(number)[0]) + 2 * _TOKEN_PADDING
        x += 0.0 if token.continues else _WORD_SPACE
        if x + width > _TOKENS_WIDTH - 0.1 and x > _LABEL_WIDTH + _WORD_SPACE:
            x, line = _LABEL_WIDTH + _WORD_SPACE, line + _LINE_HEIGHT
        for part, y in ((label, line + 0.16), (number, line + 0.35)):
            part.set_position((x + width / 2, -y))
        box = Rectangle(
            (x, -line - 0.45), width, 0.45, facecolor=colour, transform=_from_top(figure)
        )
        figure.add_artist(box)
        box.set_zorder(0)
        x += width
    return line + _LINE_HEIGHT


def _blend(share: float) -> tuple[float, ...]:
    """Return the colour of a share: white for 0, the first colour for 1, the second for -1."""
    from matplotlib.colors import to_rgb

    colour = to_rgb(COLOURS[0] if share >= 0 else COLOURS[1])
    strength = min(abs(share), 1.0)
    return tuple(1 - strength * (1 - part) for part in colour)
