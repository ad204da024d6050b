"""Ranking as a kind of task, for example the completion of knowledge graphs."""
