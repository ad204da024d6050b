"""Model cards: their text, and the escaping of names that users choose."""

import ast
import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import llmcond
from llmcond.prompts import load_prompt
from llmcond.report.card import model_card
from llmcond.tasks import KINDS, find_kind

RECORD = Path(__file__).parent / "training.json"
PROMPTS = [load_prompt("concat-sent-cond")]
#: Unescaped, it would end a code span, a paragraph, a fenced block or the metadata, or run as a
#: template.
HOSTILE = "a` <script>\r\n---\n\n```\n# {{ 7 * 7 }} {% raw %}"


def build_card(kind: str = "rated", /, config: dict | None = None, **summary) -> str:
    record = json.loads(RECORD.read_text())
    record["summary"] |= summary
    record["made_of"] |= config or {}
    return model_card(record, kind, PROMPTS, {"head": HOSTILE})


@pytest.mark.parametrize("kind", KINDS)
def test_card_of_each_kind_has_valid_python(kind):
    card = build_card(kind, scores=[])
    text = find_kind(kind).card
    python = card.partition("```python\n")[2].partition("```")[0]
    ast.parse(python)
    assert getattr(llmcond, text.loader)
    assert f'loaded = llmcond.{text.loader}("FOLDER")' in python
    assert "No rows were held out for scoring." in card
    assert ModelCard(card).data.tags[1:-1] == list(text.tags)


def test_metadata_names_data_of_the_hub_and_scores():
    record = json.loads(RECORD.read_text())
    score = {**record["summary"]["scores"][0], "pearson": None}
    record["summary"]["scores"] = [score]
    for source, datasets, dataset in (
        ("hf://datasets/ada/pairs@main/train", ["ada/pairs"], "ada/pairs"),
        ("/home/ada/pairs.csv", None, "pairs.csv"),
    ):
        record["data"]["source"] = source
        metadata = ModelCard(model_card(record, "rated", PROMPTS, {})).data
        assert metadata.datasets == datasets
        results = {result.metric_type: result for result in metadata.eval_results}
        assert "pearsonr" not in results  # it is undefined
        assert results["spearmanr"].metric_value == score["spearman"]
        assert results["spearmanr"].dataset_split == score["split"]
        assert results["spearmanr"].dataset_type == dataset


def test_user_names_are_escaped_in_card():
    teacher = {"encoder": HOSTILE, "head": HOSTILE}
    aspects = {"aspects": {HOSTILE: "digest"}, "aspects_texts": 2400}
    card = build_card(
        encoder=HOSTILE,
        head=HOSTILE,
        teacher=teacher,
        config={"teacher": {"rows": 1200}, "aspects": aspects},
    )
    shown = "`a' <script> --- ''' # {{ 7 * 7 }} {% raw %}`"
    assert card.count(shown) == 4
    # The rest is JSON in a block whose fence is longer than the one in the name.
    training = json.loads(card.split("## Training\n\n````json\n")[1].removesuffix("\n````\n"))
    assert training["head"] == {"head": HOSTILE}
    assert training["aspects"] == aspects
    assert "\r" not in card
    assert "<script>" not in card.split("## Training")[0].replace(shown, "")
    data = ModelCard(card).data
    assert (data.library_name, data.pipeline_tag) == ("peft", "sentence-similarity")
