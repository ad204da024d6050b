"""The credits of models, which may come from somebody else's model."""

import json

import pytest
from huggingface_hub import ModelCard

import llmcond
from llmcond.bundled import pretrained_folder, pretrained_names
from llmcond.encoders.checkpoints.adapter import CREDITS
from llmcond.errors import LlmcondError, UserError
from llmcond.runs.portable import read_credits

WORK = {"name": "Data", "use": "texts", "authors": "Ada", "licence": "MIT", "url": "https://a.b/c"}


def write_credits(folder, **changes):
    record = {"format": 1, "licence": "Apache-2.0", "works": [WORK], **changes}
    (folder / CREDITS).write_text(json.dumps(record))


@pytest.mark.parametrize("name", pretrained_names())
def test_card_of_bundled_model_names_every_work(name):
    folder = pretrained_folder(name)
    works = read_credits(folder).works
    card = ModelCard.load(folder / "README.md")
    assert (card.data.license, card.data.datasets) == (
        "apache-2.0",
        ["LivNLP/C-STS-Reannotated"],
    )
    assert {"base encoder", "rated sentence pairs"} < {work.use for work in works}
    for work in works:
        assert f"[{work.name}]({work.url})" in card.text
        assert work.authors in card.text
    (score,) = card.data.eval_results
    assert (score.metric_type, score.dataset_split) == ("spearmanr", "dev (5 folds)")


def test_unknown_keys_and_licences_are_accepted(tmp_path):
    write_credits(tmp_path, works=[{**WORK, "licence": "My-1.0", "year": 2026}])
    assert "[Data](https://a.b/c) | texts | Ada | My-1.0 |" in read_credits(tmp_path).to_markdown()
    assert read_credits(tmp_path).metadata == {"license": "apache-2.0"}


def test_texts_of_credits_are_not_markdown(tmp_path):
    hostile = "a|b\n\n# <script> [x](javascript:x) `y`"
    write_credits(tmp_path, works=[{**WORK, "authors": hostile, "origin": hostile, "url": hostile}])
    section = read_credits(tmp_path).to_markdown()
    escaped = r"a\|b \# &lt;script&gt; \[x\](javascript:x) \`y\`"
    assert section.count(escaped) == 2
    assert "| Data | texts |" in section
    assert section.replace(escaped, "").count("](") == 2  # the two licences


def test_invalid_credits_are_reported(tmp_path):
    for changes in ({"works": []}, {"licence": 3}, {"works": [{"name": "x"}]}, {"format": None}):
        write_credits(tmp_path, **changes)
        with pytest.raises(LlmcondError, match=CREDITS):
            read_credits(tmp_path)
    write_credits(tmp_path, format=2)
    with pytest.raises(UserError, match="newer version"):
        read_credits(tmp_path)
    assert read_credits(tmp_path / "none") is None


def test_copy_keeps_the_credits(tmp_path):
    llmcond.load_embedder("minilm-csts", device="cpu").save_pretrained(tmp_path / "copy")
    assert read_credits(tmp_path / "copy") == read_credits(pretrained_folder("minilm-csts"))
