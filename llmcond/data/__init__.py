"""Data sets: files become rows, checked, on a stated scale, in splits."""
