"""The generator of texts with attributes: its grammar, its errors, and the domain files."""

import json
from importlib import import_module
from random import Random

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.script("make_aspects")

CONDITION = """
[conditions.{0}]
text = "the {0}"
question = "Which {0}?"
short = "{0}"
description = "the {0} of the text"
other = ["its {0}", "what {0} it has"]
"""
DOMAIN = """
templates = ["{greeting} a {size} {fruit.noun} {fruit.verb}. {2-2 of size, taste}",
  "{taste?} {size}"]
[values.size]
large = ["enormous", "huge one"]
small = ["tiny", "little one"]
[values.fruit.apple]
noun = ["apple", "russet"]
verb = ["was baked", "went into the crumble"]
[values.fruit.banana]
noun = ["banana", "plantain"]
verb = ["was peeled", "went into the bread"]
[values.taste]
sweet = ["tasted {very} sweet"]
sour = ["tasted {very} sour"]
[words]
greeting = ["", "Hi,"]
very = ["very", "rather"]
""" + "".join(CONDITION.format(name) for name in ("size", "fruit", "taste"))


@pytest.fixture
def aspects(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("make_aspects")


@pytest.fixture
def fruits(aspects, tmp_path):
    def read(text=DOMAIN):
        (tmp_path / "fruits.toml").write_text(text)
        aspects.read_toml.cache_clear()
        return aspects.read_domain("fruits", tmp_path)

    return read


def test_text_contains_values_of_its_attributes(aspects, fruits):
    domain = fruits()
    texts = aspects.generate(domain, 60, seed=1)
    assert len({text.text for text in texts}) == len(texts) > 40
    for text in texts:
        for name, value in text.attrs.items():
            entry = domain.values[name][value]
            lists = entry.values() if isinstance(entry, dict) else [entry]
            for wordings in lists:
                assert any(
                    wording.split("{")[0].lower() in text.text.lower() for wording in wordings
                )
        if text.template == 0:
            assert set(text.attrs) == {"size", "fruit", "taste"}
            other = {"large": ("tiny", "little"), "small": ("enormous", "huge")}
            assert not any(word in text.text for word in other[text.attrs["size"]])


def test_repeated_attribute_gets_another_wording(aspects, fruits):
    texts = aspects.generate(fruits(), 60, seed=2)
    assert all(
        ("tiny" in t.text.lower()) == ("little" in t.text.lower())
        for t in texts
        if t.template == 0 and t.attrs["size"] == "small"
    )


def test_texts_are_reproducible_by_seed(aspects, fruits):
    domain = fruits()
    assert aspects.generate(domain, 30, 5) == aspects.generate(domain, 30, 5)
    assert aspects.generate(domain, 30, 5) != aspects.generate(domain, 30, 6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  , a apple  broke .. it  is bad .", "An apple broke. It is bad."),
        (
            "Hello, , The screen broke!. a user wrote... a hour",
            "Hello, the screen broke! A user wrote... an hour",
        ),
        (
            "at 5 p.m. we saw version 2.0 , a one-off (see .htaccess)",
            "At 5 p.m. we saw version 2.0, a one-off (see .htaccess)",
        ),
        (
            "a European saw a union and a Indian uncle in a unimportant one-way",
            "A European saw a union and an Indian uncle in an unimportant one-way",
        ),
    ],
)
def test_spaces_punctuation_and_articles_are_repaired(aspects, text, expected):
    assert aspects.tidy(text) == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{greeting}", "{greetin}", r"fruits.toml, template 1: \{greetin\} is neither"),
        ("{very} sour", "{vry} sour", r"fruits.toml, values.taste.sour: \{vry\} is neither"),
        ("{fruit.noun}", "{fruit}", r"template 1: \{fruit\} is neither"),
        ("{2-2 of", "{2-3 of", "template 1: .* needs more names than it lists"),
        ("[conditions.size]", "[conditions.sise]", r"\[conditions.size\] lacks description, other"),
        ("[words]", "[words", r"fruits.toml: .*line"),
        ("templates =", "manners = 0.1\ntemplates =", r"\[conditions.manner\] lacks description"),
        (
            "templates =",
            'include = ["vegetables"]\ntemplates =',
            "vegetables.toml: this domain file does not",
        ),
    ],
)
def test_domain_error_names_file_and_key(aspects, fruits, old, new, message):
    with pytest.raises(aspects.DomainError, match=message):
        fruits(DOMAIN.replace(old, new, 1))


def test_report_names_values_that_are_too_easy(aspects, fruits):
    domain = fruits()
    lines = "\n".join(aspects.report(domain, aspects.generate(domain, 200, 0), 300))
    assert "template 2 carries only 1: {taste?} {size}" in lines
    assert "taste = sweet: 1 ways" in lines
    assert "taste = sweet: 'sweet' is in 100% of its texts, 0% of others" in lines
    assert "only 200 of 300 texts are different" in lines


def test_manners_rewrite_text_but_not_attributes(aspects, fruits):
    plain, rewritten = (
        fruits(),
        fruits("manners = 1.0\ninclude = []" + DOMAIN + CONDITION.format("manner")),
    )
    assert "manner" not in aspects.generate(plain, 5, 0)[0].attrs
    texts = aspects.generate(rewritten, 60, 0)
    assert {text.attrs["manner"] for text in texts} == set(aspects.manners.MANNERS)
    assert all(t.text.isupper() == (t.attrs["manner"] == "shouting") for t in texts)


@pytest.mark.parametrize(
    ("manner", "expected"),
    [
        ("casual", "i don't"),
        ("formal", "I do not"),
        ("shouting", "I DON'T"),
        ("terse", "Don't know price, "),
    ],
)
def test_manner_rewrites_text(aspects, manner, expected):
    text = "I don't know the price and that is that."
    results = {aspects.manners.MANNERS[manner](text, Random(seed)) for seed in range(20)}
    assert any(expected in result for result in results)
    assert text not in results


def test_manners_preserve_ellipses_and_do_not_double_commas(aspects):
    text = "We waited... The soup was cold, and nobody came..."
    for manner in aspects.manners.MANNERS.values():
        for seed in range(20):
            result = manner(text, Random(seed))
            assert "...." not in result
            assert ",," not in result
            assert "..," not in result


def test_domain_files_are_valid(aspects, tmp_path, capsys):
    names = aspects.domain_names()
    assert aspects.main(["--out", str(tmp_path), "--texts", "60"]) == 0
    for name in names:
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert len(content["texts"]) == 60
        assert all("{" not in text["text"] for text in content["texts"])
        assert all(text["attrs"].keys() <= content["conds"].keys() for text in content["texts"])
        for condition in content["conds"].values():
            assert condition["question"].endswith("?")
            assert len({condition["text"], *condition["para"]}) >= 4


def test_invalid_arguments_exit_with_2(aspects, capsys):
    for arguments in ([], ["--check", "--only", "nosuch"]):
        with pytest.raises(SystemExit) as error:
            aspects.main(arguments)
        assert error.value.code == 2
    assert "nosuch.toml: this domain file does not exist" in capsys.readouterr().err
