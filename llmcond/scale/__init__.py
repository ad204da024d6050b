"""Extraction on several machines."""
