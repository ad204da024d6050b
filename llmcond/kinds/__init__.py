"""The bundled kinds of task, which ``llmcond.tasks`` finds by name.

The rest of the package does not import them directly.
"""
