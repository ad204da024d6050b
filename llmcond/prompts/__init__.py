"""Prompt templates: TOML files with placeholders, which become the inputs of an encoder."""

from llmcond.prompts.template import (
    InputTemplate,
    Prompt,
    list_fields,
    load_prompt,
    prompt_from_json,
)

__all__ = ["InputTemplate", "Prompt", "list_fields", "load_prompt", "prompt_from_json"]
