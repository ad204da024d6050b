"""Tables of the analyses of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmcond.display import Column, Table
from llmcond.metrics import Estimate, get_metric
from llmcond.report.tables import estimate_text, factors_text

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
        keys = ("mean_cosine", "std_cosine", "partition_ratio", "n_zero")
        tables.append(_table(note, result["isotropy"], keys))
    if "clusters" in result:
        tables.append(_clusters_table(result["clusters"], scope))
    if "conditions" in result:
        tables.append(_conditions_table(result["conditions"], scope))
    if result.get("norms"):
        note = "Norm of W_c over the distinct conditions (Hyper-CL, section 5.4.1)"
        tables.append(_table(note, result["norms"], ("n", "mean_norm", "raw", "normalised")))
    if "similarity" in result:
        tables.append(_similarity_table(result["similarity"], run, result))
    if "turns" in result:
        tables.append(_turns_table(result["turns"], run, result["split"]))
    tables += [_answers_table(head) for head in result.get("answers", ())]
    tables += [
        _examples_table(head, side)
        for head in result.get("examples", ())
        for side in ("better", "worse")
        if head[side]
    ]
    return tables


def _table(
    note: str,
    rows: JsonRows,
    figures: Sequence[str] | Mapping[str, Sequence[str]],
    texts: Sequence[str] = ("name", "minus c"),
) -> Table:
    """Return a table with columns of texts and of figures.

    Args:
        note: the text above the table.
        rows: the rows.
        figures: the keys of the figures; or the formatted figures by heading.
        texts: the headings of the texts, which are keys without spaces; ``minus c`` tells whether
            ``subtract`` is true.
    """
    columns = []
    for heading in texts:
        key = heading.replace(" ", "")
        cells = [
            ("yes" if row["subtract"] else "no") if heading == "minus c" else row[key] or "–"
            for row in rows
        ]
        columns.append(Column(heading, cells))
    if not isinstance(figures, Mapping):
        figures = {key: [_format_figure(row[key]) for row in rows] for key in figures}
    columns += [Column(key.replace("_", " "), cells, "figures") for key, cells in figures.items()]
    return Table(columns, note)


def _format_figure(value: float | None, form: str = ".4g") -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:{form}}"


def _format_difference(row: Mapping[str, Any], interval: bool = False) -> str:
    low, high = row["difference_ci"]
    text = f"{row['difference']:.3f}"
    return f"{text} [{low:.3f}, {high:.3f}]" if interval and low is not None else text


def _similarity_table(rows: JsonRows, run: object, result: Mapping[str, Any]) -> Table:
    note = (
        f"Mean cosine of contexts with other candidates (random) and with the answer (correct) of "
        f"{run}, {result['split']}, {result['n']:,} next turns (Triple-Encoders, table 6)"
    )
    figures = {key: [f"{row[key]:.3f}" for row in rows] for key in ("random", "correct")}
    figures["difference"] = [_format_difference(row, interval=True) for row in rows]
    return _table(note, rows, figures, ("name", "score"))


def _turns_table(rows: JsonRows, run: object, split: str) -> Table:
    first = rows[0]
    note = (
        f"Cosine with the answer minus mean cosine with other candidates, by turn of the context, "
        f"of {run}, {split}, {first['n']:,} contexts of {first['history']} turns "
        "(Triple-Encoders, figure 8)"
    )
    figures = {
        str(turn["turn"]): [_format_difference(row["turns"][i]) for row in rows]
        for i, turn in enumerate(first["turns"])
    }
    return _table(note, rows, figures, ("name", "score"))


def _clusters_table(rows: JsonRows, scope: str) -> Table:
    conditions = rows[0]["conditions"]
    note = (
        f"K-means of the sentences of {scope}, under {len(conditions)} conditions: impurity (0 if "
        "every condition has its own cluster; Hyper-CL, section 5.2), before and after the head, "
        "and sentences per cluster"
    )
    figures = {
        "before": [_format_figure(row.get("impurity_before"), ".3f") for row in rows],
        "impurity": [f"{row['impurity']:.3f}" for row in rows],
    }
    counts = [["/".join(map(str, counts)) for counts in row["counts"]] for row in rows]
    table = _table(note, rows, figures)
    columns = [
        Column(condition, cells, "figures")
        for condition, cells in zip(conditions, zip(*counts, strict=True), strict=True)
    ]
    return Table([*table.columns, *columns], note)


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
    figures = {
        key: [
            "–"
            if row[key] is None
            else estimate_text(metric, Estimate.from_json(row[key], row[f"{key}_ci"]))
            for row in rows
        ]
        for key in ("overall", "seen", "unseen")
    }
    return _table(note, rows, figures)


def _answers_table(head: Mapping[str, Any]) -> Table:
    note = (
        f"Similarity before ({head['before']}) and after ({head['name']}) of sentences and of "
        "answers (CASE, tables 3 and 8)"
    )
    rows = head["rows"]
    figures = {key: [_format_figure(r[key], ".4f") for r in rows] for key in ("before", "after")}
    return _table(note, rows, figures, ("text 1", "text 2", "condition"))


def _examples_table(head: Mapping[str, Any], side: str) -> Table:
    note = (
        f"Similarity before ({head['before']}) and after ({head['name']}): rows that changed most "
        f"for the {side}, of {head[f'n_{side}']:,} {side} rows. Ratings from 0 to 1 (CASE, tables "
        "3 and 8)"
    )
    keys = ("rating", "before", "after")
    figures = {key: [f"{row[key]:.2f}" for row in head[side]] for key in keys}
    return _table(note, head[side], figures, ("sentence 1", "sentence 2", "condition"))
