"""What is known by name: models, prompts and heads, with their settings, one row each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from llmcond.config import bundled_names
from llmcond.encoders.models import MODELS, default_prompt
from llmcond.prompts import load_prompt


def models() -> list[dict[str, Any]]:
    """Return a row for each known encoder."""
    return [
        {
            "name": model.name,
            "repo": model.repo,
            "dim": model.dim,
            "pooling": model.pooling,
            "max_length": model.max_length,
            "normalize": model.normalize,
            "instruction_format": model.instruction_format,
            "default_prompt": default_prompt(model.instruction_format),
            "licence": model.licence,
        }
        for model in MODELS
    ]


def prompts() -> list[dict[str, Any]]:
    """Return a row for each bundled prompt."""
    rows = []
    for name in bundled_names("prompts"):
        prompt = load_prompt(name)
        rows.append(
            {
                "name": name,
                "description": prompt.description,
                "instruction": prompt.conditional.instruction,
                "text": prompt.conditional.text,
                "unconditional_instruction": prompt.unconditional.instruction,
                "unconditional_text": prompt.unconditional.text,
                "source": prompt.source,
            }
        )
    return rows


def heads() -> list[dict[str, Any]]:
    """Return a row for each bundled head recipe."""
    from llmcond.heads.recipes import load_recipe

    rows = []
    for name in bundled_names("heads"):
        recipe = load_recipe(name)
        settings = " ".join(f"{k}={v}" for k, v in asdict(recipe.settings).items())
        about = {"name": name, "kind": recipe.family.kind, "description": recipe.description}
        rows.append({**about, "settings": settings, "source": recipe.source})
    return rows
