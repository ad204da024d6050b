"""Checks and speeds as a Markdown page, for the terminal and for a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from llmcond.benchmark.checks import Check
from llmcond.benchmark.speeds import PLAIN, Profile, Skipped, Speed
from llmcond.display import Table

#: The number of characters of a kernel's name that are shown; names of templates have thousands.
_MAX_NAME_LENGTH = 100
_VERDICTS = {True: "yes", False: "**NO**", None: "not run"}


def page(
    machine: dict[str, Any],
    checks: Sequence[Check],
    speeds: Sequence[Speed],
    skipped: Sequence[Skipped],
    profiles: Sequence[Profile],
) -> str:
    """Return the machine, checks, speeds, skipped measurements and profiles as a page."""
    facts = {key: value for key, value in machine.items() if key != "versions"}
    machine_text = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items())
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = ["# llmcond bench", "", f"{machine_text}.", "", f"{versions}.", ""]
    if checks:
        lines += [
            "## Checks",
            "",
            Table.of_rows([_check_row(check) for check in checks]).document("markdown"),
        ]
    lines += _speed_sections(speeds)
    for profile in profiles:
        subject = f"{profile.model}, {profile.precision}, {profile.inputs}"
        rows = [
            {
                "kernel": name[:_MAX_NAME_LENGTH],
                "share of the time": f"{share:.0%}",
                "calls": f"{count:,}",
            }
            for name, share, count in profile.kernels
        ]
        lines += [
            "",
            f"## Where the time goes: {subject}",
            "",
            Table.of_rows(rows).document("markdown"),
        ]
    if skipped:
        lines += ["", "## Not measured", ""]
        lines += [f"- {item.what}: {item.why}" for item in skipped]
    return "\n".join(lines) + "\n"


def _check_row(check: Check) -> dict[str, str]:
    return {
        "check": check.name,
        "difference": "" if check.difference is None else f"{check.difference:.1e}",
        "at most": "" if check.bound is None else f"{check.bound:.0e}",
        "passed": _VERDICTS[check.passed],
        "note": check.note,
    }


def _speed_sections(speeds: Sequence[Speed]) -> Iterator[str]:
    for (model, precision), group in groupby(speeds, lambda one: (one.model, one.precision)):
        rows = list(group)
        loaded = f"Loaded in {rows[0].load_seconds:.1f} s. Attention: {rows[0].kernel}."
        yield from ("", f"## {model}, {precision}", "", loaded, "")
        yield Table.of_rows([_speed_row(speed) for speed in rows]).document("markdown")


def _speed_row(speed: Speed) -> dict[str, str]:
    ratio = speed.ratios.get(PLAIN)
    return {
        "inputs": f"{speed.n:,} of {speed.inputs}",
        "way": speed.way,
        "tokens/s": f"{speed.tokens_per_second:,.0f}",
        "inputs/s": f"{speed.inputs_per_second:,.1f}",
        "times the plain loop": "" if ratio is None else f"{ratio:.2f}",
        "share of the peak": f"{speed.peak_share:.0%}",
        "peak memory GiB": f"{speed.memory_gib:.2f}",
        "difference": "" if speed.difference is None else f"{speed.difference:.1e}",
    }
