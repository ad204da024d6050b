"""Prompt templates: what they render to, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from identities import IDENTITY

from llmcond.config import bundled_names
from llmcond.encoders.spec import EncoderIdentity, EncoderInput
from llmcond.errors import UserError
from llmcond.prompts import Part, Prompt, load_prompt, prompt_from_json

SENTENCE, CONDITION = "Two men ride.", "the number of people"
TEMPLATE = """
description = "d"
source = "s"
[conditional]
instruction = "Given {condition}"
text = "{sentence}"
[unconditional]
text = "{condition}"
"""


def load(tmp_path: Path, text: str) -> Prompt:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_prompt(str(path))


@pytest.mark.parametrize(
    ("name", "conditional", "unconditional"),
    [
        (
            "cond",
            (
                "Retrieve semantically similar texts to the Condition, given the Sentence: "
                "Two men ride.",
                "the number of people",
            ),
            (
                "Retrieve semantically similar texts to a given Sentence",
                "the number of people",
            ),
        ),
        (
            "sent",
            (
                "Retrieve semantically similar texts to the Sentence, given the Condition: "
                "the number of people",
                "Two men ride.",
            ),
            (
                "Retrieve semantically similar texts to a given Sentence",
                "the number of people",
            ),
        ),
        (
            "concat-cond-sent",
            ("", "the number of people Two men ride."),
            ("", "the number of people"),
        ),
        (
            "concat-sent-cond",
            ("", "Two men ride. the number of people"),
            ("", "the number of people"),
        ),
    ],
)
def test_bundled_prompts_render_the_wording_of_case(
    name: str, conditional: tuple[str, str], unconditional: tuple[str, str]
):
    prompt = load_prompt(name)
    assert prompt.conditional.render(SENTENCE, CONDITION) == EncoderInput(*conditional)
    assert prompt.unconditional.render(SENTENCE, CONDITION) == EncoderInput(*unconditional)


PLAIN = IDENTITY
INSTRUCTED = replace(PLAIN, instruction_format="{instruction} {text}", special_tokens="{text} </s>")


@pytest.mark.parametrize(
    ("name", "encoder", "obstacle"),
    [
        ("cond", PLAIN, "takes none"),
        ("sent", PLAIN, "takes none"),
        ("cond", INSTRUCTED, ""),
        ("concat-cond-sent", PLAIN, ""),
        ("concat-sent-cond", INSTRUCTED, ""),
        ("pair-cond", PLAIN, ""),
        ("pair-sent", PLAIN, ""),
        ("pair-cond", INSTRUCTED, "reads one text only"),
        ("pair-cond", replace(PLAIN, pooling="cls"), "--pooling mean"),
        ("pair-cond", replace(PLAIN, pooling="last"), ""),
    ],
)
def test_a_prompt_knows_which_encoders_can_take_it(
    name: str, encoder: EncoderIdentity, obstacle: str
):
    found = load_prompt(name).obstacle(encoder)
    assert (obstacle in found) if obstacle else found == ""


def test_a_context_on_one_side_only_is_refused(tmp_path: Path):
    path = tmp_path / "half.toml"
    path.write_text(
        'description = "d"\nsource = "s"\n[conditional]\ncontext = "{sentence}"\n'
        'text = "{condition}"\n[unconditional]\ntext = "{condition}"\n'
    )
    with pytest.raises(UserError, match='context = "" reads nothing before'):
        load_prompt(str(path))


@pytest.mark.parametrize("part", [Part("{condition}", "Embed"), Part("{condition}", context="")])
def test_an_unconditional_part_alone_can_be_an_obstacle(part: Part):
    prompt = Prompt("d", "s", Part("{sentence} {condition}"), part)
    assert prompt.obstacle(replace(PLAIN, pooling="cls", instruction_format=""))


def test_pair_prompts_put_one_text_into_the_context():
    prompt = load_prompt("pair-cond")
    rendered = prompt.conditional.render(SENTENCE, CONDITION)
    assert rendered == EncoderInput("", CONDITION, context=SENTENCE)
    # An empty context is not none: both vectors are pooled over the condition's own tokens.
    unconditional = prompt.unconditional.render(SENTENCE, CONDITION)
    assert unconditional == EncoderInput("", CONDITION, context="")


def test_a_context_changes_the_digest_and_none_does_not():
    plain = Prompt("d", "s", Part("{sentence} {condition}"), Part("{condition}"))
    empty = replace(plain, unconditional=Part("{condition}", context=""))
    assert plain.digest != empty.digest
    recorded = prompt_from_json(plain.to_json(), "run.json")
    assert recorded.digest == plain.digest
    # As it was recorded before there were contexts.
    old = json.loads(json.dumps(plain.to_json()))
    for part in ("conditional", "unconditional"):
        del old[part]["context"]
    assert prompt_from_json(old, "run.json") == plain


def test_instruction_and_context_exclude_each_other(tmp_path: Path):
    path = tmp_path / "both.toml"
    path.write_text(
        'description = "d"\nsource = "s"\n[conditional]\ninstruction = "{sentence}"\n'
        'context = "{sentence}"\ntext = "{condition}"\n[unconditional]\ntext = "{condition}"\n'
    )
    with pytest.raises(UserError, match="both an instruction and a context"):
        load_prompt(str(path))


@given(st.text(), st.text())
def test_texts_are_put_in_untouched_whatever_braces_they_hold(sentence: str, condition: str):
    part = Part(text="{condition}|{sentence}", instruction="I: {sentence}")
    expected = EncoderInput(f"I: {sentence}", f"{condition}|{sentence}")
    assert part.render(sentence, condition) == expected


def test_placeholders_inside_a_sentence_are_text():
    rendered = load_prompt("cond").conditional.render("a {condition} {{b}} {", "{sentence}")
    assert rendered.instruction.endswith("given the Sentence: a {condition} {{b}} {")
    assert rendered.text == "{sentence}"


def test_doubled_braces_in_a_template_are_single_braces_of_text(tmp_path: Path):
    prompt = load(tmp_path, TEMPLATE.replace('"{sentence}"', '"{{x}} {sentence}"'))
    assert prompt.conditional.render("s", "c").text == "{x} s"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{sentence}", "{sentense}", ["{sentense}", "Did you mean 'sentence'", "{condition}"]),
        ("{sentence}", "{}", ["unknown placeholder {}"]),
        ("{sentence}", "{0}", ["unknown placeholder {0}"]),
        ("{sentence}", "{sentence.upper}", ["unknown placeholder {sentence.upper}"]),
        ("{sentence}", "{sentence[0]}", ["unknown placeholder {sentence[0]}"]),
        ("Given {condition}", "Given {x}", ["[conditional] instruction", "{x}"]),
        ('"{sentence}"', '"no place"', ["[conditional] lacks the placeholder {sentence}"]),
        ("{sentence}", "it", ["[conditional] lacks the placeholder {sentence}", "separate"]),
        ('"{condition}"', '"{condition} {sentence}"', ["names {condition} and {sentence}"]),
        ('"{condition}"', '"nothing"', ["[unconditional] names none", "exactly one"]),
        ("{sentence}", "{sentence", ["[conditional] text", "{{ and }}"]),
        ("{sentence}", "sentence}", ["[conditional] text", "{{ and }}"]),
        ('text = "{condition}"', 'text = " "', ["[unconditional] text is empty"]),
        (
            'instruction = "Given {condition}"\ntext = "{sentence}"',
            'instruction = "{sentence} {condition}"\ntext = ""',
            ["[conditional] text is empty"],
        ),
        ('source = "s"', 'sauce = "s"', ["missing key 'source'", "unknown key 'sauce'"]),
        ('description = "d"', "", ["missing key 'description'"]),
        ('description = "d"', "description = 1", ["'description' is 1", "string"]),
        (
            "[unconditional]\n",
            '[unconditional]\ntxt = ""\n',
            ["unknown key 'unconditional.txt'", "Did you mean 'text'", "text, instruction"],
        ),
        ('text = "{condition}"', "", ["missing key 'unconditional.text'"]),
        ('source = "s"', 'source = "s"\nname = "n"', ["'name'", "named by its file"]),
    ],
)
def test_a_faulty_template_is_refused_with_its_place(
    tmp_path: Path, old: str, new: str, words: list[str]
):
    assert old in TEMPLATE
    with pytest.raises(UserError) as caught:
        load(tmp_path, TEMPLATE.replace(old, new))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "mine.toml"))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "placeholder", ["{sentence!r}", "{sentence:>10}", "{sentence:{condition}}"]
)
def test_a_conversion_or_format_spec_is_refused_as_it_was_written(tmp_path: Path, placeholder: str):
    with pytest.raises(UserError) as caught:
        load(tmp_path, TEMPLATE.replace("{sentence}", placeholder))
    assert placeholder in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Given {condition}", "Given: {condition}"),
        ('"{sentence}"', '"{sentence}."'),
        ('"{condition}"', '"{condition}."'),
        ("[unconditional]\n", '[unconditional]\ninstruction = "I"\n'),
    ],
)
def test_the_digest_changes_with_every_string_that_is_encoded(tmp_path: Path, old: str, new: str):
    assert load(tmp_path, TEMPLATE).digest != load(tmp_path, TEMPLATE.replace(old, new)).digest


def test_the_digest_tells_an_instruction_from_a_text():
    both, swapped = Part("a", "b"), Part("b", "a")
    assert Prompt("d", "s", both, both).digest != Prompt("d", "s", swapped, swapped).digest


def test_the_digest_stays_with_another_description_source_and_name():
    prompt = load_prompt("cond")
    renamed = replace(prompt, name="n", description="d", source="s")
    assert renamed.digest == prompt.digest


@pytest.mark.parametrize("name", ["cond", "sent", "concat-cond-sent", "concat-sent-cond"])
def test_a_record_gives_the_prompt_back(name: str):
    prompt = load_prompt(name)
    assert prompt_from_json(prompt.to_json(), "manifest.json") == prompt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conditional": {"text": "{sentence} {condition}", "instruction": ""}}, "digest"),
        ({"unconditional": {"text": "{sentence}", "instruction": ""}}, "digest"),
        ({"digest": "0" * 32}, "digest"),
        ({"digest": None}, "digest"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"unconditional": {"text": "{word}", "instruction": ""}}, "unknown placeholder"),
    ],
)
def test_a_changed_record_is_refused(change: dict[str, object], words: str):
    record = {**load_prompt("cond").to_json(), **change}
    with pytest.raises(UserError, match=words) as caught:
        prompt_from_json(record, "manifest.json")
    assert str(caught.value).startswith("manifest.json")


def test_a_template_that_encodes_both_apart_is_separate(tmp_path: Path):
    joint = load(tmp_path, TEMPLATE)
    apart = load(tmp_path, TEMPLATE.replace("Given {condition}", "Given"))
    assert (joint.separate, apart.separate) == (False, True)
    assert load_prompt("separate").separate
    assert all(load_prompt(name).of_condition for name in bundled_names("prompts"))
