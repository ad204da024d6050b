"""Prompt templates: TOML files with placeholders, which become the inputs of an encoder."""

from llmcond.prompts.template import Part, Prompt, fields_of, load_prompt, prompt_from_json

__all__ = ["Part", "Prompt", "fields_of", "load_prompt", "prompt_from_json"]
