"""The model card of an export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmcond.encoders.checkpoints.checkpoint import Checkpoint
from llmcond.exporting.run import without_path
from llmcond.features.view import View
from llmcond.files import write_text
from llmcond.report.card import code, code_block, fenced
from llmcond.system import versions

if TYPE_CHECKING:
    from llmcond.exporting.exported import ExportResult

_TEXTS = '["A man rides a horse.", "A girl cycles."]'


def write_card(
    folder: Path, made: ExportResult, checkpoint: Checkpoint, view: View, command: str
) -> None:
    """Write README.md: what it is, how it is used, and what made it."""
    from huggingface_hub import ModelCardData

    known = checkpoint.known
    base = known.repo if known else checkpoint.repo
    licence = known.licence if known else None
    metadata = ModelCardData(
        base_model=base,
        library_name="sentence-transformers",
        license=licence.lower() if licence else None,
        pipeline_tag="sentence-similarity",
        tags=["llmcond", "conditional-semantic-textual-similarity", "sentence-similarity"],
    )
    about = {key: without_path(value) for key, value in made.about.items()}
    under = ", ".join(f"`{code(one)}`" for one in made.conditions) or "any condition"
    lines = [
        f"---\n{metadata.to_yaml()}\n---",
        "# A condition-aware text encoder",
        f"`{code(about['encoder'])}` with the head `{code(about['head'])}`, "
        f"under {under}: vectors of {made.dim} dimensions and length 1.",
        "## Use",
        code_block(_use(made), "python"),
        *made.notes,
        "## What made it",
        f"{_licence(base, licence)} Written by",
        code_block(command, "bash"),
        fenced(
            {
                "conditions": list(made.conditions),
                **about,
                "prompts": [
                    {
                        "name": prompt.name,
                        "conditional": prompt.conditional.templates,
                        "unconditional": prompt.unconditional.templates,
                    }
                    for prompt in view.prompts
                ],
                "versions": versions(),
            }
        ),
    ]
    write_text(folder / "README.md", "\n\n".join(lines) + "\n")


def _use(made: ExportResult) -> str:
    load, argument = "from sentence_transformers import SentenceTransformer", ""
    model = 'SentenceTransformer("FOLDER")  # where this card lies'
    if made.chosen_by == "any":
        load, argument = "import llmcond", ', condition="the place"'
        model = f"llmcond.load_sentence_transformer{model.removeprefix('SentenceTransformer')}"
    elif made.chosen_by != "fixed":
        argument = f", {made.chosen_by}={made.conditions[0]!r}"
    return (
        f"{load}\n\nmodel = {model}\n"
        f"vectors = model.encode({_TEXTS}{argument})\nmodel.similarity(vectors, vectors)"
    )


def _licence(base: str | None, licence: str | None) -> str:
    if base is None:
        return "The weights are those of a local checkpoint; its licence holds for them."
    stated = f" ({licence})" if licence else ""
    return f"The weights come from `{code(base)}`{stated}, whose licence holds for them."
