"""Checks and speeds as a Markdown page, for people and for a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from tabulate import tabulate

from llmcond.benchmark.checks import Check
from llmcond.benchmark.speeds import PLAIN, Profile, Skipped, Speed

#: Characters of a kernel's name that are shown; templates have thousands.
_LONG = 100
_VERDICTS = {True: "yes", False: "**NO**", None: "not run"}


def page(
    machine: dict[str, Any],
    checks: Sequence[Check],
    speeds: Sequence[Speed],
    skipped: Sequence[Skipped],
    profiles: Sequence[Profile],
) -> str:
    """Return all as one page."""
    facts = {key: value for key, value in machine.items() if key != "versions"}
    on = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = ["# llmcond bench", "", f"{on}.", "", f"{versions}.", ""]
    if checks:
        lines += ["## Checks", "", _table([_check_row(check) for check in checks])]
    lines += _speeds(speeds)
    for profile in profiles:
        what = f"{profile.model}, {profile.precision}, {profile.inputs}"
        rows = [
            {"kernel": name[:_LONG], "of the time": f"{share:.0%}", "calls": f"{count:,}"}
            for name, share, count in profile.kernels
        ]
        lines += ["", f"## Where the time goes: {what}", "", _table(rows)]
    if skipped:
        lines += ["", "## Not measured", ""]
        lines += [f"- {one.what}: {one.why}" for one in skipped]
    return "\n".join(lines) + "\n"


def _check_row(check: Check) -> dict[str, str]:
    return {
        "check": check.name,
        "difference": "" if check.difference is None else f"{check.difference:.1e}",
        "at most": "" if check.bound is None else f"{check.bound:.0e}",
        "passed": _VERDICTS[check.passed],
        "note": check.note,
    }


def _speeds(speeds: Sequence[Speed]) -> Iterator[str]:
    for (model, precision), group in groupby(speeds, lambda one: (one.model, one.precision)):
        rows = list(group)
        loaded = f"Loaded in {rows[0].load_seconds:.1f} s. Attention: {rows[0].kernel}."
        yield from ("", f"## {model}, {precision}", "", loaded, "")
        yield _table([_speed_row(one) for one in rows])


def _speed_row(one: Speed) -> dict[str, str]:
    ratio = one.ratios.get(PLAIN)
    return {
        "inputs": f"{one.n:,} of {one.inputs}",
        "way": one.way,
        "tokens/s": f"{one.tokens_per_second:,.0f}",
        "inputs/s": f"{one.inputs_per_second:,.1f}",
        "times the plain loop": "" if ratio is None else f"{ratio:.2f}",
        "of the peak": f"{one.peak_share:.0%}",
        "peak memory GiB": f"{one.memory_gib:.2f}",
        "difference": "" if one.difference is None else f"{one.difference:.1e}",
    }


def _table(rows: Sequence[dict[str, str]]) -> str:
    escaped = [{k: " ".join(v.split()).replace("|", r"\|") for k, v in row.items()} for row in rows]
    return tabulate(escaped, "keys", "github", disable_numparse=True)
