"""Templates of questions, and the parsing of answers."""

import math

import pytest

from llmcond.base.errors import UserError
from llmcond.base.records import bundled_folder
from llmcond.prompts.questions import (
    bundled_templates,
    example_reply,
    load_template,
    parse_answer,
    parse_presence,
    parse_proposal,
    parse_rating,
)

VALUES = {"sentence1": "one {x}", "sentence2": "two", "condition": "{sentence1}"}


def test_rating_is_parsed():
    for answer, rating in (
        ('{"rating": "4"}', 0.75),
        ('{"answer1": "two {men}", "answer2": "none", "rating": "1"}', 0),
        ('```json\n{"rating": "5"}\n```', 1),
        ('<think>{"rating": "1"}? Rather more.</think>{"rating": "5"}', 1),
        ('<thinking></thinking><think>{"rating": "1"}</think>Rating: 5', 1),
        ('{"rating": "ill-defined"}', math.nan),
        ("Rating: 4", 0.75),
        ('{"rating": "4", "why": "he said "1""', 0.75),
        ('{"answer1": "the phone has a rating: 3 of 5", "answer2": "', None),
        ("<think> A rating: 1 means nothing in common. Let me", None),
        ('{"rating": "6"}', None),
        ('{"rating": true}', None),
        ("I rate 2 of these 4 sentences", None),
        ("{" * 30_000, None),
    ):
        expected = rating if rating is None else pytest.approx(rating, nan_ok=True)
        assert parse_rating(answer) == expected


def test_proposal_is_parsed():
    for answer, proposal in (
        (
            '{"partner": 2, "alike": " a  b", "different": "c"}',
            [("x", "q", "a b"), ("x", "q", "c")],
        ),
        ('{"partner": 0, "alike": "", "different": ""}', []),
        ('{"partner": 4, "alike": "a", "different": "b"}', None),
        ('{"partner": 1, "alike": 3, "different": "b"}', None),
        (
            '{"partner": 1, "alike": "cafe\u0301\u00a0", "different": "b"}',
            [("x", "p", "caf\u00e9"), ("x", "p", "b")],
        ),
        (r'{"partner": 1, "alike": "\ud800", "different": "b"}', None),
        (r'{"partner": 1, "alike": "a", "different": "\u0000"}', None),
    ):
        assert parse_proposal(answer, "x", ["p", "q", "r"]) == proposal


def test_short_answer_is_parsed():
    for answer, short in (
        ('{"answer": " the\\nlate  parcel. "}', "the late parcel"),
        ('<think>{"answer": "x"}</think>{"answer": 3}', "3"),
        ('{"answer": "Not mentioned"}', ""),
        ('{"answer": ""}', ""),
        ('{"answer": "N/A"}', ""),
        ("**Answer:** the parcel", "the parcel"),
        ("the parcel", "the parcel"),
        ("none", ""),
        ('{"answer": ["a"]}', None),
        ('{"answer": "I\'m sorry, I cannot help."}', None),
        ('{"answer": "%s"}' % ("a " * 60), None),
        (r'{"answer": "\ud800"}', None),
        ("I cannot answer this.", None),
        ("Sorry.", None),
        ('{"answer": "I can\'t log in"}', "I can't log in"),
        ('{"answer": "Sorry for the delay"}', "Sorry for the delay"),
        ('{"answer": "As an airline pilot"}', "As an airline pilot"),
        ('{"answer": "\'.NET\'."}', ".NET"),
        ("It is late.\nIt is lost.", None),
        ('{"ans', None),
        ('{"answer": "The customer wants to cancel the or', None),
        ('{"answer": "Paris", "x": ', None),
        ("<think> hmm\nAnswer: it could be x", None),
        ("", None),
    ):
        assert parse_answer(answer) == short, answer
    for answer in ("the parcel", ""):
        assert parse_answer(example_reply("answer", answer)) == answer
        assert parse_presence(example_reply("presence", answer)) == bool(answer)


def test_presence_is_parsed():
    for answer, presence in (
        ('{"mentioned": "yes"}', True),
        ('<think>{"mentioned": "yes"}</think>{"mentioned": "no"}', False),
        ('{"mentioned": true}', True),
        ("No, it does not.", False),
        ("**Yes**", True),
        ("Perhaps yes", None),
        ('{"mentioned": "maybe"}', None),
        ("", None),
    ):
        assert parse_presence(answer) is presence, answer


def test_bundled_templates_are_distinct_and_insert_texts_verbatim():
    templates = bundled_templates()
    assert {template.name for template in templates} >= {"rate", "answer-then-compare", "propose"}
    assert len({template.digest for template in templates}) == len(templates)
    for template in templates:
        assert template.description
        assert template.source
        assert load_template(template.name, template.kind) == template
    system, user = load_template("answer-then-compare", "rate").messages(VALUES)
    assert (system["role"], user["role"]) == ("system", "user")
    assert "Sentence 1: one {x}\n" in user["content"]
    assert "Condition: {sentence1}\n" in user["content"]
    assert '"answer1": ...' in user["content"]
    values = {"text": "{condition}", "condition": "the place"}
    system, first, reply, last = load_template("answer", "answer").messages(
        values, [({"text": "a park", "condition": "the place"}, example_reply("answer", "park"))]
    )
    assert (reply["role"], reply["content"]) == ("assistant", example_reply("answer", "park"))
    assert first["content"] == last["content"].replace("Text: {condition}", "Text: a park")


def test_invalid_template_is_reported_with_its_file(tmp_path):
    path = tmp_path / "mine.toml"
    text = (bundled_folder("prompts", "annotate") / "rate.toml").read_text()
    for old, new, message in (
        ("{condition}", "it", "question lacks the placeholder {condition}"),
        ("{condition}", "{condition!r}", "write {condition}"),
        ("{condition}", "{condition} {", "for literal braces"),
        ('kind = "rate"', 'kind = "rate"\nname = "x"', "A prompt has the name of its file"),
        ('kind = "rate"', 'kind = "rate"\nfirst = ["rating"]', "first has 'rating'"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(UserError, match=r"mine\.toml") as error:
            load_template(str(path), "rate")
        assert message in str(error.value)
