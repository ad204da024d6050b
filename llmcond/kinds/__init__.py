"""The kinds of task, each found by its name; no module outside imports them.

See :mod:`llmcond.runs.kind`.
"""
