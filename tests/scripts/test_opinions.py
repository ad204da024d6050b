"""Generated reviews: their opinions, their variants, and the files of all domains."""

from itertools import combinations
from random import Random

import pytest
from aspect_opinions import CLAUSES, SIGNS, generate_opinions, opinion_wordings
from make_aspects import domain_json, domain_names, read_toml

REVIEWS = [name for name in domain_names() if "aspects" in read_toml(name)]


@pytest.fixture(scope="module")
def content():
    """A small domain, whose words show the aspect and the opinion."""
    aspects = {
        name: {
            "names": [f"the {name}"],
            "good": [f"{name}-good"],
            "bad": [f"{name}-bad"],
            **{key: [f"{name} {key} {number}" for number in "ab"] for key in CLAUSES.values()},
        }
        for name in ("desk", "lamps", "door")
    }
    values = {"wood": ["it is wooden"], "steel": ["it is of steel"]}
    facts = {"kind": {"text": "the kind", "question": "Which?", "other": [], "values": values}}
    return {"aspects": aspects, "facts": facts, "texts": [{"text": "A fine desk.", "desk": "+"}]}


def test_texts_have_the_opinions_of_their_attributes(content):
    texts = generate_opinions(content, 400, Random(0))
    assert len(dict(texts)) == 400
    assert texts[0] == ("A fine desk.", {"desk": "positive", "sentiment": "positive"})
    for text, attributes in texts[1:]:
        mentioned = {name for name in content["aspects"] if name in text.lower()}
        assert mentioned == set(attributes) - {"frame", "kind", "sentiment"}
        opinions = {attributes[name] for name in mentioned} - {"neutral"} or {"neutral"}
        assert attributes["sentiment"] == ("mixed" if len(opinions) > 1 else opinions.pop())
        assert ("wooden" in text or "steel" in text) == ("kind" in attributes)
        clauses = {clause: value for value, clause in CLAUSES.items()}
        for name in mentioned:
            for clause, value in clauses.items():
                if f"{name} {clause}" in text.lower():
                    assert attributes[name] == value


def test_variants_of_a_text_differ_in_the_words_of_one_opinion(content):
    by_frame = {}
    for text, attributes in generate_opinions(content, 400, Random(0))[1:]:
        by_frame.setdefault(attributes["frame"], []).append((text, attributes))
    differences = []
    for variants in by_frame.values():
        (_, original), *others = variants
        for _, attributes in others:
            changed = [
                key for key in original if original[key] != attributes[key] and key != "sentiment"
            ]
            differences.append(len(changed))
            assert {original[key] for key in changed} <= {"positive", "negative"}
        for first, second in combinations(variants, 2):
            assert first[1].keys() == second[1].keys()
    assert set(differences) == {1}
    assert len(differences) > 100


def test_names_in_the_plural_have_verbs_in_the_plural(content):
    texts = " ".join(text.lower() for text, _ in generate_opinions(content, 900, Random(1)))
    assert "the lamps are" in texts
    assert "the lamps is" not in texts
    assert "the desk are" not in texts
    assert "[" not in texts
    assert "{" not in texts


def test_conditions_name_the_aspect(content):
    conditions = opinion_wordings(content, Random(0))
    assert conditions["desk"]["text"] == "the opinion about the desk"
    assert all("desk" in wording for wording in conditions["desk"]["para"])


@pytest.mark.parametrize("name", REVIEWS)
def test_files_of_reviews_are_complete(name):
    content = read_toml(name)
    assert len(content["aspects"]) >= 7
    clauses = []
    for entry in content["aspects"].values():
        assert min(len(entry[key]) for key in ("names", "good", "bad")) >= 2
        clauses += [clause for key in CLAUSES.values() for clause in entry[key]]
    assert len(set(clauses)) == len(clauses)
    assert not [clause for clause in clauses if clause.endswith(".") or not clause.strip()]
    for text in content.get("texts", []):
        assert {text[key] for key in text if key != "text"} <= set(SIGNS)
        assert set(text) - {"text"} <= set(content["aspects"])
    generated = domain_json(name, 60, 0)
    assert len(generated["texts"]) == 60


def test_conditions_whose_values_are_sentiments_are_of_one_kind():
    reviews = domain_json("bicycle_reviews", 300, 0)
    facts = {f"bicycle_reviews.{fact}" for fact in read_toml("bicycle_reviews")["facts"]}
    kinds = {key: wordings.get("kind") for key, wordings in reviews["conds"].items()}
    assert {key for key, kind in kinds.items() if kind != "opinion"} == facts
    assert kinds["bicycle_reviews.sentiment"] == "opinion"
    tickets = domain_json("support_tickets", 300, 0)["conds"]
    assert tickets["support_tickets.sentiment"]["kind"] == "opinion"
    assert "kind" not in tickets["support_tickets.product"]
