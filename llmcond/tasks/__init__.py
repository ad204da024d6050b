"""Tasks: how a data set is read, what of it is encoded under a condition, and how it is scored."""

from llmcond.tasks.base import DEFAULT_TASK, Task, find_task

__all__ = ["DEFAULT_TASK", "Task", "find_task"]
