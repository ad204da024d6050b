"""Evaluation: metrics with confidence intervals, comparisons, rankings and other measurements."""

#: File of a model with the measurements that condition checks are calibrated by.
CALIBRATION = "conditions.json"
