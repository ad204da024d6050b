"""The root of the repository, and the code in its pages."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_blocks(text):
    """Return the blocks of Python in Markdown."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_block(page, words):
    """Run the one block of a page of ``docs/`` that contains some words, and return its names."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = [block for block in python_blocks(text) if words in block]
    namespace = {}
    exec(block, namespace)  # text of the page
    return namespace
