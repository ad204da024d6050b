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
    data = {**record["data"], "source": "hf://datasets/ada/pairs@main/train"}
    scores = [{**row, "pearson": None} for row in record["summary"]["scores"][:1]]
    assert scores
    record = {**record, "data": data, "summary": {**record["summary"], "scores": scores}}
    metadata = ModelCard(model_card(record, "rated", PROMPTS, {})).data
    assert metadata.datasets == ["ada/pairs"]
    results = {result.metric_type: result for result in metadata.eval_results}
    assert "pearsonr" not in results  # it is undefined
    assert results["spearmanr"].metric_value == scores[0]["spearman"]
    assert results["spearmanr"].dataset_split == scores[0]["split"]
    assert results["spearmanr"].dataset_type == "ada/pairs"
    data["source"] = "/home/ada/pairs.csv"
    metadata = ModelCard(model_card(record, "rated", PROMPTS, {})).data
    assert metadata.datasets is None
    assert {result.dataset_type for result in metadata.eval_results} == {"pairs.csv"}


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


def test_card_describes_ensemble_and_last_stage():
    estimates = ({"spearman": value, "spearman_ci": [0.1, 0.9]} for value in (0.5, 0.4))
    folds = {"folds": 5, **dict(zip(("trained", "without"), estimates, strict=True))}
    then = {"steps": 1000, "weight": 2, "share": 0.5, "folds": folds}
    members = [{**json.loads(RECORD.read_text())["summary"], "then": then}] * 2
    card = " ".join(build_card(members=members).split())
    assert "fine-tuned as an ensemble of 2 members, each with LoRA of rank 4 and the head" in card
    assert "selected on dev, separately for each member" in card
    assert (
        "stage of 1,000 steps also trained on dev, each row 2 times, and on 50 % of train," in card
    )
    assert (
        "The Spearman is 50.0 [10.0, 90.0], and 40.0 [10.0, 90.0] before the stage (95 % "
        "confidence intervals over sentence pairs). It was estimated on 5 folds of dev" in card
    )
