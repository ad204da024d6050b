"""Tables of the analyses of heads, and the explanation of an embedding as text and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from llmcond.base.files import PAGE_SUFFIXES, data_path, suffix, write_csv
from llmcond.base.metrics import Estimate, get_metric
from llmcond.base.output import Column, Table
from llmcond.base.package import __version__
from llmcond.base.text import condition_titles
from llmcond.evaluation.results import estimate_text
from llmcond.report.figures import ShadedToken, TokenRow, plot_tokens
from llmcond.report.page import write_html
from llmcond.report.tables import factors_text, isotropy_table, number_column
from llmcond.runs.similarity import SUBTRACTED, ConditionExplanation, Explanation, Values

JsonRows = Sequence[Mapping[str, Any]]


def analysis_tables(result: Mapping[str, Any], run: object) -> list[Table]:
    """Return a table for every analysis in ``result``.

    Args:
        result: the analyses as JSON.
        run: the name of the run, for the notes.
    """
    scope = f"{run}, {result['split']}, {result['n']:,} rated rows"
    tables = []
    if "isotropy" in result:
        note = f"Isotropy of the embeddings of {scope} (CASE, appendix B)"
        tables.append(isotropy_table(result["isotropy"], note))
    if "clusters" in result:
        tables.append(_clusters_table(result["clusters"], scope))
    if "conditions" in result:
        tables.append(_conditions_table(result["conditions"], scope))
    if result.get("norms"):
        note = "Norm of W_c over the distinct conditions (Hyper-CL, section 5.4.1)"
        rows = [_head_cells(row) | row for row in result["norms"]]
        keys = ("name", "minus c", "n", "mean_norm", "raw", "normalised")
        tables.append(Table.of_rows(rows, keys, note))
    if "similarity" in result:
        tables.append(_similarity_table(result["similarity"], run, result))
    if "turns" in result:
        tables.append(_turns_table(result["turns"], run, result["split"]))
    for head in result.get("answers", ()):
        note = f"{_describe_change(head)} of sentences and of answers (CASE, tables 3 and 8)"
        rows = [{**row, "condition": row["condition"] or "–"} for row in head["rows"]]
        tables.append(Table.of_rows(rows, note=note))
    for head, side in product(result.get("examples", ()), ("better", "worse")):
        note = (
            f"{_describe_change(head)}: rows that changed most for the {side}, of "
            f"{head[f'n_{side}']:,} {side} rows. Ratings from 0 to 1 (CASE, tables 3 and 8)"
        )
        texts = Table.of_rows(head[side], ("sentence1", "sentence2", "condition")).columns
        figures = (
            number_column(key, [row[key] for row in head[side]], "{:.2f}".format)
            for key in ("rating", "before", "after")
        )
        if head[side]:
            tables.append(Table([*texts, *figures], note))
    return tables


def _describe_change(head: Mapping[str, Any]) -> str:
    return f"Similarity before ({head['before']}) and after ({head['name']})"


def _head_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": row["name"], "minus c": row["subtract"]}


def _similarity_table(rows: JsonRows, run: object, result: Mapping[str, Any]) -> Table:
    note = (
        f"Mean cosine of contexts with other candidates (random) and with the answer (correct) of "
        f"{run}, {result['split']}, {result['n']:,} next turns (Triple-Encoders, table 6)"
    )
    cells = []
    for row in rows:
        low, high = row["difference_ci"]
        interval = "" if low is None else f" [{low:.3f}, {high:.3f}]"
        cells.append({**row, "difference": f"{row['difference']:.3f}{interval}"})
    return Table.of_rows(cells, ("name", "score", "random", "correct", "difference"), note)


def _turns_table(rows: JsonRows, run: object, split: str) -> Table:
    first = rows[0]
    note = (
        f"Cosine with the answer minus mean cosine with other candidates, by turn of the context, "
        f"of {run}, {split}, {first['n']:,} contexts of {first['history']} turns "
        "(Triple-Encoders, figure 8)"
    )
    cells = [
        {"name": row["name"], "score": row["score"]}
        | {str(turn["turn"]): turn["difference"] for turn in row["turns"]}
        for row in rows
    ]
    return Table.of_rows(cells, note=note)


def _clusters_table(rows: JsonRows, scope: str) -> Table:
    conditions = rows[0]["conditions"]
    note = (
        f"K-means of the sentences of {scope}, under {len(conditions)} conditions: impurity (0 if "
        "every condition has its own cluster; Hyper-CL, section 5.2), before and after the head, "
        "and sentences per cluster"
    )
    cells = []
    for row in rows:
        counts = ("/".join(map(str, counts)) for counts in row["counts"])
        impurities = {"before": row.get("impurity_before"), "impurity": row["impurity"]}
        cells.append(_head_cells(row) | impurities | dict(zip(conditions, counts, strict=True)))
    return Table.of_rows(cells, note=note)


def _conditions_table(rows: JsonRows, scope: str) -> Table:
    first = rows[0]
    metric = get_metric(first["metric"])
    note = (
        f"Conditions seen and unseen in training, {scope} (Hyper-CL, section 5.3): "
        f"{metric.heading}, 95 % confidence intervals over sentence pairs. "
        f"{factors_text([metric])}{first['n_seen_conditions']:,} conditions "
        f"({first['n_seen']:,} rows) are seen, {first['n_unseen_conditions']:,} "
        f"({first['n_unseen']:,} rows) are unseen"
    )
    cells = [
        _head_cells(row)
        | {
            key: "–"
            if row[key] is None
            else estimate_text(metric, Estimate.from_json(row[key], row[f"{key}_ci"]))
            for key in ("overall", "seen", "unseen")
        }
        for row in rows
    ]
    return Table.of_rows(cells, note=note)


_FOLDER = Path(__file__).parent
#: The length of the longest bar in a table, in characters.
_BAR_LENGTH = 12
#: What a figure or a table shows, by the method of the explanation.
_SUBJECTS = {
    "pooling-weights": "Weights of the tokens in routed pooling; they sum to 1.",
    "router-weights": "Weights of the tokens in the routed layers of the encoder.",
    "exact": "Contributions of the tokens to the similarity (exact); with the subtracted "
    "condition, they sum to the similarity.",
    "leave-one-out": "Contributions of the tokens to the similarity (leave-one-out): how much it "
    "falls without the token. They do not sum to the similarity.",
}
_ALONE = (
    "How far the embedding moves without the token (leave-one-out): how much less similar it is to "
    "that of the whole sentence."
)
_SHADES = "Shades are relative to the largest of all values; special tokens have none."


# -- tables ------------------------------------------------------------------------------------


def show_explanation(explanation: Explanation, form: str = "table") -> None:
    """Print the value of each token under each condition, with bars in a terminal.

    Conditions whose tokens are the same share a table.
    """

    def tokens_of(row: TokenRow) -> list[str]:
        return [f"{token.text}{' (special)' * token.special}" for token in row.tokens]

    has_bars = form == "table" and not any(e.layers for e in explanation.conditions)
    for tokens, rows in groupby(_token_rows(explanation), key=tokens_of):
        columns = [Column("token", tokens)]
        for row in rows:
            heading = ", ".join(filter(None, (row.title, row.detail)))
            columns.append(Column(heading, [token.number for token in row.tokens], "figures"))
            if has_bars:
                columns.append(Column("", [_bar(token.share) for token in row.tokens], "word"))
        Table(columns, subject(explanation)).print(form)


def _bar(share: float) -> str:
    """Return a bar for a share of the largest value; a negative one is of lighter blocks."""
    return ("█" if share > 0 else "░") * round(abs(share) * _BAR_LENGTH)


def subject(explanation: Explanation) -> str:
    """Return a sentence that says what the values of an explanation are."""
    if explanation.method == "leave-one-out" and explanation.to is None:
        return _ALONE
    return _SUBJECTS[explanation.method]


def format_value(explanation: Explanation, value: float) -> str:
    """Return a weight, or a contribution with its sign, in three decimals."""
    rounded = round(value, 3) + 0.0  # without a sign before zero
    return f"{rounded:.3f}" if explanation.quantity == "weight" else f"{rounded:+.3f}"


def _find_largest(conditions: Sequence[ConditionExplanation]) -> float:
    """Return the largest absolute value of a token that is not special."""
    values = [
        abs(float(value))
        for explained in conditions
        for series in (*explained.layers.values(), explained.values)
        for token, value in zip(explained.tokens, series, strict=True)
        if not token.special
    ]
    return max([*values, float(np.finfo(np.float32).tiny)])


# -- figures -----------------------------------------------------------------------------------


def write_explanation(explanation: Explanation, path: Path) -> None:
    """Write the figure of an explanation, and its numbers as CSV; see ``data_path``.

    Args:
        explanation: the explanation.
        path: the file to write: a page (.html) or a figure (.svg, .png or .pdf).
    """
    rows = explanation.rows()
    columns = list(rows[0])
    table = [list(row.values()) for row in rows]
    token_rows = list(_token_rows(explanation))
    if suffix(path) not in PAGE_SUFFIXES:
        to = "" if explanation.to is None else f" Compared with: {explanation.to}"
        caption = f"{subject(explanation)}{to} {_SHADES}"
        plot_tokens(token_rows, path, caption, columns, table)
        return
    write_html(
        path,
        _FOLDER / "explanation.html.j2",
        [],
        (_FOLDER / "explanation.css").read_text("utf-8"),
        None,
        explanation=explanation,
        subject=subject(explanation),
        shades=_SHADES,
        rows=token_rows,
        provenance=_describe_provenance(explanation),
    )
    write_csv(data_path(path), columns, table)


def _token_rows(explanation: Explanation) -> Iterator[TokenRow]:
    """Yield a row of shaded tokens for each condition, and for each layer of a router."""
    largest = _find_largest(explanation.conditions)
    titles = condition_titles([explained.condition for explained in explanation.conditions])
    for title, explained in zip(titles, explanation.conditions, strict=True):
        series = {f"layer {n}": values for n, values in explained.layers.items()}
        series["mean of the layers" if series else ""] = explained.values
        for name, values in series.items():
            detail = (
                name if explained.similarity is None else f"similarity {explained.similarity:.3f}"
            )
            yield TokenRow(title, detail, list(_shade(explanation, explained, values, largest)))


def _shade(
    explanation: Explanation,
    explained: ConditionExplanation,
    values: Values,
    largest: float,
) -> Iterator[ShadedToken]:
    end: int | None = None
    for token, value in zip(explained.tokens, values, strict=True):
        # A figure shows the sentence as it is, without spaces between the parts of a word.
        label = token.text
        if token.start is not None:
            label = explanation.sentence[token.start : token.end]
        continues = token.start is not None and token.start == end
        end = token.end
        number = format_value(explanation, float(value))
        share = 0.0 if token.special else float(value) / largest
        yield ShadedToken(label, number, share, token.special, continues)
    if explained.condition_term is not None:
        number = format_value(explanation, explained.condition_term)
        yield ShadedToken(SUBTRACTED, number, 0.0, True, False)


def _describe_provenance(explanation: Explanation) -> dict[str, str]:
    """Return the method, the model and the version, as labelled texts."""
    about = {
        key: ", ".join(value) if isinstance(value, Mapping) else str(value)
        for key, value in explanation.about.items()
        if value
    }
    return {"method": explanation.method, **about, "llmcond": __version__}
