"""A comparison of prompts in words, and as a table with its intervals drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from llmcond.report.terminal import hundred

Results = Sequence[Mapping[str, Any]]

#: More prompts than that are counted, not named, where nothing was found about them.
_NAMED = 3
#: Characters of a drawn interval.
_BAR = 21
#: Fewer sentence pairs than that tell next to nothing.
FEW_PAIRS = 30


def summary(results: Results, baseline: str) -> list[str]:
    """Return what a comparison shows, in sentences."""
    first = results[0]
    prompts = {result["prompt"] for result in results}
    heads = sorted({result["head"] for result in results} - {"none"})
    with_heads = f" and with {_listed(heads)}" if heads else ""
    best = next((result for result in results if result["spearman"] is not None), None)
    told = [] if best is None else [f"Best: {_named(best)}, Spearman {_figure(best, 'spearman')}."]
    sentences = [
        *told,
        f"{_count(len(prompts), 'prompt')}, zero-shot{with_heads}, on {first['n']:,} rated rows of "
        f"{first['n_pairs']:,} sentence pairs of {first['split']}.",
    ]
    if first["n_pairs"] < FEW_PAIRS:
        sentences.append(
            f"{first['n_pairs']:,} sentence pairs are few: only large differences can be told from "
            "chance."
        )
    for head in ["none", *heads]:
        sentences += _verdicts([r for r in results if r["head"] == head], head, baseline)
    sentences += _controls(results)
    return sentences


def _verdicts(results: Results, head: str, baseline: str) -> list[str]:
    """Return what one head tells of prompts beside the baseline."""
    compared = [result for result in results if result["difference"] and not result["control"]]
    if not compared:
        return []
    told = "Zero-shot" if head == "none" else f"With {head}"
    groups = {
        verdict: [r for r in compared if r["difference"]["spearman"]["verdict"] == verdict]
        for verdict in ("better", "worse", "no evidence")
    }
    parts = [
        f"{verdict} than {baseline}: {_listed([_difference(r) for r in groups[verdict]])}"
        for verdict in ("better", "worse")
        if groups[verdict]
    ]
    unsure = groups["no evidence"]
    if unsure:
        minima = [r["difference"]["spearman"]["minimum"] for r in unsure]
        least = [100 * value for value in minima if value is not None]
        could = f" (these rows would show {max(least):.1f} or more)" if least else ""
        few = len(unsure) <= _NAMED
        which = _listed([_prompt(r) for r in unsure]) if few else f"the other {len(unsure)}"
        parts.append(f"no evidence of a difference to {baseline} for {which}{could}")
    return [f"{told}: {'; '.join(parts)}."]


def _controls(results: Results) -> list[str]:
    """Return whether controls are at chance."""
    controls = [result for result in results if result["control"]]
    defined = [result for result in controls if result["accuracy_ci"][0] is not None]
    if not defined:
        return []
    off = [r for r in defined if not r["accuracy_ci"][0] <= 0.5 <= r["accuracy_ci"][1]]
    if not off:
        return [
            "The controls are at chance, as they should be: the interval of their accuracy holds "
            "50.0 each time."
        ]
    named = _listed([f"{_named(result)} ({_figure(result, 'accuracy')})" for result in off])
    return [
        f"Of {_count(len(defined), 'control')}, {len(off)} are not at chance: {named}. One in "
        "twenty is to be expected; more than that means that something beside the condition "
        "predicts which of two rows is rated higher."
    ]


def _named(result: Mapping[str, Any]) -> str:
    head = "zero-shot" if result["head"] == "none" else str(result["head"])
    return f"{head} on {_prompt(result)}"


def _prompt(result: Mapping[str, Any]) -> str:
    return str(result["prompt"]) + ("" if result["subtract"] else " (c kept)")


def _difference(result: Mapping[str, Any]) -> str:
    found = result["difference"]["spearman"]
    return (
        f"{_prompt(result)} by {_signed(found['value'])} {_interval(found['low'], found['high'])}"
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _figure(result: Mapping[str, Any], key: str) -> str:
    return f"{hundred(result[key])} {_interval(*result[f'{key}_ci'])}"


def _interval(low: float | None, high: float | None) -> str:
    return f"[{hundred(low)}, {hundred(high)}]"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:+.1f}"


# -- the table ---------------------------------------------------------------------------------


def comparison_table(results: Results, baseline: str, run: object, *, drawn: bool = True) -> Table:
    """Return a comparison, a row for each prompt, head and subtraction; figures are times 100.

    Args:
        results: at least one.
        baseline: the prompt that others are compared with.
        run: what the title names.
        drawn: whether there is a column of intervals drawn with characters.
    """
    first = results[0]
    title = (
        f"{run}, {first['split']}: {first['n']:,} rows of {first['n_pairs']:,} sentence pairs. "
        f"Times 100, 95 % intervals over pairs. Differences are to {baseline} with the same head; "
        "p after Holm's correction."
    )
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("head", "prompt"):
        table.add_column(heading, overflow="fold")
    table.add_column("minus c", no_wrap=True)
    table.add_column("Spearman", justify="right", no_wrap=True)
    table.add_column("seeds ±", justify="right", no_wrap=True)
    least, most = _range(results)
    if drawn:
        table.add_column(f"{100 * least:.0f} to {100 * most:.0f}", no_wrap=True)
    for heading in ("difference", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            Text(str(result["head"])),
            Text(str(result["prompt"]) + (" (control)" if result.get("control") else "")),
            "yes" if result["subtract"] else "no",
            _figure(result, "spearman"),
            hundred(result["spearman_sd"]),
            *([_drawn(result, least, most)] if drawn else []),
            *_evidence(result, baseline),
            _figure(result, "accuracy"),
        )
    return table


def _evidence(result: Mapping[str, Any], baseline: str) -> tuple[str, str, str]:
    """Return the cells of the difference to the baseline."""
    if not result["difference"]:
        return "", "", "baseline" if result["prompt"] == baseline else "–"
    found = result["difference"]["spearman"]
    p = found["p_holm"]
    shown = "–" if p is None else "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0")
    difference = f"{_signed(found['value'])} {_interval(found['low'], found['high'])}"
    return difference, shown, str(found["verdict"])


def _range(results: Results) -> tuple[float, float]:
    """Return what the drawn intervals span."""
    ends = [end for result in results for end in (result["spearman"], *result["spearman_ci"])]
    known = [end for end in ends if end is not None]
    return (min(known), max(known)) if known else (0.0, 1.0)


def _drawn(result: Mapping[str, Any], least: float, most: float) -> str:
    """Return an interval as a line of characters, with the value on it."""
    value, (low, high) = result["spearman"], result["spearman_ci"]
    if value is None:
        return ""

    def place(at: float) -> int:
        share = (at - least) / (most - least) if most > least else 0.5
        return min(_BAR - 1, max(0, round(share * (_BAR - 1))))

    cells = [" "] * _BAR
    if low is not None and high is not None:
        for i in range(place(low), place(high) + 1):
            cells[i] = "─"
    cells[place(value)] = "●"
    return "".join(cells).rstrip()
