"""What is known by name: models, prompts and heads, with their settings, one row each."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

from llmcond.config import bundled_names
from llmcond.encoders.known import MODELS, PADDING_SIDE, default_prompt
from llmcond.encoders.options import MODEL_SETTINGS
from llmcond.encoders.spec import Dtype
from llmcond.prompts import load_prompt


def models() -> list[dict[str, Any]]:
    """Return a row for each known encoder."""
    return [
        {
            "name": model.name,
            "repo": model.repo,
            "n_parameters": model.n_parameters,
            "dim": model.dim,
            **{name: getattr(model, name) for name in MODEL_SETTINGS if name != "pooling"},
            "pooling": model.poolings[0],
            "poolings": list(model.poolings),
            "padding_side": PADDING_SIDE,
            "default_prompt": default_prompt(model.instruction_format),
            "dtypes": [d for d in get_args(Dtype) if d != "float16" or not model.no_float16],
            "gated": model.gated,
            "licence": model.licence,
        }
        for model in MODELS
    ]


def models_in_brief(width: int) -> list[dict[str, Any]]:
    """Return what of each known encoder goes into so many characters."""
    rows = [
        {
            "name": row["name"],
            "size": f"{row['n_parameters'] / 1e9:.2f} B",
            "dim": row["dim"],
            "attention": row["attention"],
            "pooling": ", ".join(row["poolings"]),
            "length": row["max_length"],
            "instruction": "yes" if row["instruction_format"] else "no",
            "licence": row["licence"] + (" (gated)" if row["gated"] else ""),
        }
        for row in models()
    ]
    if width >= _WIDE:
        return rows
    return [{key: row[key] for key in ("name", "size", "attention")} for row in rows]


#: Characters that all columns of the brief listing take.
_WIDE = 155


def prompts() -> list[dict[str, Any]]:
    """Return a row for each bundled prompt."""
    rows = []
    for name in bundled_names("prompts"):
        prompt = load_prompt(name)
        rows.append(
            {
                "name": name,
                "description": prompt.description,
                "control": prompt.control,
                "instruction": prompt.conditional.instruction,
                "context": prompt.conditional.context,
                "text": prompt.conditional.text,
                "unconditional_instruction": prompt.unconditional.instruction,
                "unconditional_context": prompt.unconditional.context,
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
        about = {"name": name, "kind": recipe.kind, "description": recipe.description}
        rows.append({**about, "settings": settings, "source": recipe.source})
    return rows
