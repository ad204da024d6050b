"""Clusters of texts: how they are found, guided, named, scored and drawn."""
