"""Presentation of results: terminal tables, pictures, HTML pages and model cards."""
