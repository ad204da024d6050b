"""Extraction on several cores or machines, with Ray."""
