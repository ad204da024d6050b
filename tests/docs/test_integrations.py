"""docs/integrations.md: what needs no further library is run, as it stands on the page."""

import re
import shlex

import numpy as np
from helpers.commands import ok
from helpers.paths import ROOT

import llmcond

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def block(name):
    [found] = [text for text in BLOCKS if name in text]
    return found


def test_an_export_of_the_bundled_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^llmcond (export --out places .*)$", PAGE, re.MULTILINE)[1]
    made = ok(capsys, *shlex.split(command))
    # Its adapter is added to the weights.
    assert made["difference"] < 1e-5
    home = {}
    exec(block('SentenceTransformer("places")'), home)  # the page's own text
    texts = ["Two women read a book at the beach.", "Two women cook at night."]
    wanted = llmcond.load_embedder("minilm-conditions").encode(texts, "the place")
    np.testing.assert_allclose(home["vectors"], wanted, atol=1e-5)


def test_any_condition():
    exec(block("load_sentence_transformer("), {})


def test_the_others_are_python():
    for text in BLOCKS:
        compile(text, "docs/integrations.md", "exec")
