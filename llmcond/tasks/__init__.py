"""Tasks: how a data set is read, what of it is encoded under a condition, and how it is scored."""

from llmcond.tasks.base import Task, find_task

__all__ = ["Task", "find_task"]
