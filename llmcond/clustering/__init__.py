"""Clustering of texts: finding, guiding, naming, scoring and drawing clusters."""
