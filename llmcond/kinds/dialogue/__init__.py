"""Dialogues as a kind of task."""
