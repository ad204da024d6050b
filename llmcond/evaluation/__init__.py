"""Evaluation: metrics with confidence intervals, comparisons, rankings and other measurements."""
