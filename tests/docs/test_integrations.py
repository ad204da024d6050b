"""Examples of docs/integrations.md run as printed, if they need no additional library."""

import re
import shlex

import numpy as np
from helpers.commands import run_json
from helpers.paths import ROOT

import llmcond

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def find_block(name):
    [block] = [text for text in BLOCKS if name in text]
    return block


def test_exported_bundled_model_gives_the_same_vectors(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^llmcond (export --out places .*)$", PAGE, re.MULTILINE)[1]
    report = run_json(capsys, *shlex.split(command))
    # The export adds the adapter to the weights.
    assert report["difference"] < 1e-5
    namespace = {}
    exec(find_block('SentenceTransformer("places")'), namespace)  # text of the page
    texts = ["Two women read a book at the beach.", "Two women cook at night."]
    expected = llmcond.load_embedder("minilm-conditions").encode(texts, "the place")
    np.testing.assert_allclose(namespace["vectors"], expected, atol=1e-5)


def test_example_with_any_condition_runs():
    exec(find_block("load_sentence_transformer("), {})


def test_all_python_blocks_compile():
    for text in BLOCKS:
        compile(text, "docs/integrations.md", "exec")
