"""Benchmarks of encoders on this machine: checks that vectors are correct, and speeds.

This package imports neither ``llmcond.runs`` nor the storage library, so it works without the
latter.
"""
