"""Fitted embedders as models of other libraries."""
