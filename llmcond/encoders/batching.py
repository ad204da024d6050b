"""Batches by a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group inputs of like length into batches of at most ``max_tokens`` tokens with padding.

    Args:
        lengths: tokens of each input.
        max_tokens: budget of one batch: its rows times its longest row. An input that is longer
            by itself gets a batch of its own.

    Returns:
        Positions in ``lengths``, longest first; every position once. The plan is a function of
        its arguments alone, so that a resumed extraction computes the same batches.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for index in order:
        # Sorted longest first, so a batch's first row is its width.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
