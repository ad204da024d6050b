"""Tasks: how a dataset is read, which texts are encoded under a condition, and how it is scored."""

from llmcond.tasks.base import DEFAULT_TASK, OTHER_SPLIT, TASKS, AnyTask, Data, find_task
from llmcond.tasks.rated import Task

__all__ = ["DEFAULT_TASK", "OTHER_SPLIT", "TASKS", "AnyTask", "Data", "Task", "find_task"]
