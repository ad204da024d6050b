"""The work of ``llmcond explain``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.runs import cross

if TYPE_CHECKING:
    from llmcond.runs.explanation import Explanation
    from llmcond.workflows.options.texts import ExplainOptions


def explain(options: ExplainOptions) -> Explanation:
    """Explain a sentence's embedding or similarity, and write the figure if there is one.

    Raises:
        UserError: as ``Embedder.explain``, or the run is of another task, or the figure cannot be
            written.
        LlmcondError: the encoder fails.
    """
    from llmcond.report.explanations import write_explanation

    model = cross.load_similarity_model(
        options.resolve_folder(), options.head, options.prompt, options.device
    )
    explanation = model.explain(options.sentence, options.conditions(), to=options.to)
    if options.out is not None:
        write_explanation(explanation, Path(options.out))
    return explanation
