"""The files of a checkpoint: finding them, reading their settings, and loading their weights."""
