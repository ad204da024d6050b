"""Prompt templates: rendering, validation, digests, controls and routers."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.identities import IDENTITY
from hypothesis import given
from hypothesis import strategies as st

import llmcond
from llmcond.bundled import bundled_names
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.data.rows import Rows
from llmcond.encoders.settings import EncoderIdentity
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.errors import UserError
from llmcond.features.view import FeatureView
from llmcond.prompts import InputTemplate, Prompt, load_prompt, prompt_from_json
from llmcond.prompts.inputs import (
    SplitInputs,
    find_same_inputs,
    input_conditions,
    render_rows,
)

pytestmark = pytest.mark.usefixtures("in_tmp")

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


def load_template(tmp_path: Path, text: str) -> Prompt:
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
        ("pair-cond", INSTRUCTED, "reads single texts only"),
        ("pair-cond", replace(PLAIN, pooling="cls"), "--pooling mean"),
        ("pair-cond", replace(PLAIN, pooling="last"), ""),
    ],
)
def test_obstacle_names_why_an_encoder_does_not_suit(
    name: str, encoder: EncoderIdentity, obstacle: str
):
    message = load_prompt(name).obstacle(encoder)
    assert (obstacle in message) if obstacle else message == ""


def test_context_in_one_part_only_is_rejected(tmp_path: Path):
    path = tmp_path / "half.toml"
    path.write_text(
        'description = "d"\nsource = "s"\n[conditional]\ncontext = "{sentence}"\n'
        'text = "{condition}"\n[unconditional]\ntext = "{condition}"\n'
    )
    with pytest.raises(UserError, match='context = "" reads nothing before'):
        load_prompt(str(path))


@pytest.mark.parametrize(
    "part", [InputTemplate("{condition}", "Embed"), InputTemplate("{condition}", context="")]
)
def test_unconditional_part_alone_can_be_an_obstacle(part: InputTemplate):
    prompt = Prompt("d", "s", InputTemplate("{sentence} {condition}"), part)
    assert prompt.obstacle(replace(PLAIN, pooling="cls", instruction_format=""))


def test_pair_prompts_put_one_text_into_the_context():
    prompt = load_prompt("pair-cond")
    rendered = prompt.conditional.render(SENTENCE, CONDITION)
    assert rendered == EncoderInput("", CONDITION, context=SENTENCE)
    # An empty context differs from none: both vectors are pooled over the condition's tokens only.
    unconditional = prompt.unconditional.render(SENTENCE, CONDITION)
    assert unconditional == EncoderInput("", CONDITION, context="")


def test_only_a_context_changes_the_digest():
    plain = Prompt("d", "s", InputTemplate("{sentence} {condition}"), InputTemplate("{condition}"))
    empty = replace(plain, unconditional=InputTemplate("{condition}", context=""))
    assert plain.digest != empty.digest
    restored = prompt_from_json(plain.to_json(), "run.json")
    assert restored.digest == plain.digest


def test_instruction_and_context_exclude_each_other(tmp_path: Path):
    path = tmp_path / "both.toml"
    path.write_text(
        'description = "d"\nsource = "s"\n[conditional]\ninstruction = "{sentence}"\n'
        'context = "{sentence}"\ntext = "{condition}"\n[unconditional]\ntext = "{condition}"\n'
    )
    with pytest.raises(UserError, match="both an instruction and a context"):
        load_prompt(str(path))


@given(st.text(), st.text())
def test_texts_with_braces_are_inserted_unchanged(sentence: str, condition: str):
    part = InputTemplate(text="{condition}|{sentence}", instruction="I: {sentence}")
    expected = EncoderInput(f"I: {sentence}", f"{condition}|{sentence}")
    assert part.render(sentence, condition) == expected


def test_placeholders_inside_a_sentence_are_text():
    rendered = load_prompt("cond").conditional.render("a {condition} {{b}} {", "{sentence}")
    assert rendered.instruction.endswith("given the Sentence: a {condition} {{b}} {")
    assert rendered.text == "{sentence}"


def test_doubled_braces_in_a_template_are_single_braces_of_text(tmp_path: Path):
    prompt = load_template(tmp_path, TEMPLATE.replace('"{sentence}"', '"{{x}} {sentence}"'))
    assert prompt.conditional.render("s", "c").text == "{x} s"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
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
        ('source = "s"', 'sauce = "s"', ["the key 'source' is missing", "unknown key 'sauce'"]),
        ('description = "d"', "", ["the key 'description' is missing"]),
        ('description = "d"', "description = 1", ["'description' is 1", "string"]),
        (
            "[unconditional]\n",
            '[unconditional]\ntxt = ""\n',
            ["unknown key 'unconditional.txt'", "Did you mean 'text'", "text, instruction"],
        ),
        ('text = "{condition}"', "", ["the key 'unconditional.text' is missing"]),
        ('source = "s"', 'source = "s"\nname = "n"', ["'name'", "has the name of its file"]),
    ],
)
def test_invalid_template_is_reported_with_its_file(
    tmp_path: Path, old: str, new: str, expected: list[str]
):
    assert old in TEMPLATE
    with pytest.raises(UserError) as caught:
        load_template(tmp_path, TEMPLATE.replace(old, new))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "mine.toml"))
    assert all(text in message for text in expected), message


@pytest.mark.parametrize(
    "placeholder", ["{sentence!r}", "{sentence:>10}", "{sentence:{condition}}"]
)
def test_conversion_or_format_spec_is_quoted_in_the_error(tmp_path: Path, placeholder: str):
    with pytest.raises(UserError) as caught:
        load_template(tmp_path, TEMPLATE.replace("{sentence}", placeholder))
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
def test_digest_changes_with_every_encoded_string(tmp_path: Path, old: str, new: str):
    assert (
        load_template(tmp_path, TEMPLATE).digest
        != load_template(tmp_path, TEMPLATE.replace(old, new)).digest
    )


def test_digest_distinguishes_instruction_from_text():
    both, swapped = InputTemplate("a", "b"), InputTemplate("b", "a")
    assert Prompt("d", "s", both, both).digest != Prompt("d", "s", swapped, swapped).digest


def test_digest_ignores_description_source_and_name():
    prompt = load_prompt("cond")
    renamed = replace(prompt, name="n", description="d", source="s")
    assert renamed.digest == prompt.digest


@pytest.mark.parametrize("name", bundled_names("prompts"))
def test_prompt_is_restored_from_its_record(name: str):
    prompt = load_prompt(name)
    assert prompt_from_json(prompt.to_json(), "manifest.json") == prompt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conditional": {"text": "{sentence} {condition}", "instruction": ""}}, "digest"),
        ({"unconditional": {"text": "{sentence}", "instruction": ""}}, "digest"),
        ({"digest": "0" * 32}, "digest"),
        ({"digest": None}, "digest"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"unconditional": {"text": "{word}", "instruction": ""}}, "unknown placeholder"),
    ],
)
def test_changed_record_is_rejected(change: dict[str, object], message: str):
    record = {**load_prompt("cond").to_json(), **change}
    with pytest.raises(UserError, match=message) as caught:
        prompt_from_json(record, "manifest.json")
    assert str(caught.value).startswith("manifest.json")


def test_template_that_encodes_texts_separately_is_separate(tmp_path: Path):
    joint = load_template(tmp_path, TEMPLATE)
    separate = load_template(tmp_path, TEMPLATE.replace("Given {condition}", "Given"))
    assert (joint.separate, separate.separate) == (False, True)
    assert load_prompt("separate").separate
    joint = [load_prompt(name) for name in bundled_names("prompts")]
    assert all(prompt.subtracts_condition for prompt in joint if prompt.control != "left-out")


# -- the bundled templates ---------------------------------------------------------------------

#: Conditional and unconditional inputs of every bundled template for SENTENCE and CONDITION. Each
#: is a text, or a pair of an instruction or context and a text.
QUESTION = f"What is {CONDITION}?"
RENDERED = {
    "concat-sent-question": (f"{SENTENCE} {QUESTION}", QUESTION),
    "concat-question-sent": (f"{QUESTION} {SENTENCE}", QUESTION),
    "pair-question": ((SENTENCE, QUESTION), ("", QUESTION)),
    "eol": (
        f'This sentence: "{SENTENCE}" means in one word regarding {CONDITION}:"',
        f'This sentence means in one word regarding {CONDITION}:"',
    ),
    "eol-question": (
        f'This sentence: "{SENTENCE}" {QUESTION} The answer in one word:"',
        f'{QUESTION} The answer in one word:"',
    ),
    "question-cond": (
        (f"Answer the question, given the Sentence: {SENTENCE}", QUESTION),
        ("Answer the question about a given Sentence", QUESTION),
    ),
    "question-sent": (
        (f"Answer the question about the Sentence: {QUESTION}", SENTENCE),
        ("Answer the question about a given Sentence", QUESTION),
    ),
    "identify": (
        (f"Identify {CONDITION} in the given text", SENTENCE),
        ("Identify what is said in the given text", CONDITION),
    ),
    "sts-sent": (
        (f"Retrieve semantically similar text, with regard to {CONDITION}.", SENTENCE),
        ("Retrieve semantically similar text.", CONDITION),
    ),
    "sts-concat": (
        ("Retrieve semantically similar text.", f"{SENTENCE} {CONDITION}"),
        ("Retrieve semantically similar text.", CONDITION),
    ),
    "sts-gemma": (
        (f"sentence similarity, with regard to {CONDITION}", SENTENCE),
        ("sentence similarity", CONDITION),
    ),
    "retrieval-cond": (
        (
            "Given a web search query, retrieve relevant passages that answer the query for the "
            f"Sentence: {SENTENCE}",
            CONDITION,
        ),
        ("Given a web search query, retrieve relevant passages that answer the query", CONDITION),
    ),
    "retrieval-question": (
        (
            "Given a question, retrieve passages that answer the question for the Sentence: "
            f"{SENTENCE}",
            QUESTION,
        ),
        ("Given a question, retrieve passages that answer the question", QUESTION),
    ),
    "control-no-condition": (SENTENCE, SENTENCE),
    "control-shuffled": (f"{SENTENCE} {CONDITION}", CONDITION),
}


@pytest.mark.parametrize("name", RENDERED)
def test_bundled_templates_render_as_expected(name: str):
    prompt = load_prompt(name)
    for part, expected in zip(
        (prompt.conditional, prompt.unconditional), RENDERED[name], strict=True
    ):
        first, text = ("", expected) if isinstance(expected, str) else expected
        rendered = part.render(SENTENCE, CONDITION)
        assert (rendered.context or rendered.instruction, rendered.text) == (first, text)


def test_every_encoder_has_enough_bundled_templates():
    prompts = [load_prompt(name) for name in bundled_names("prompts")]
    joint = [prompt for prompt in prompts if not prompt.separate and prompt.control is None]
    assert len([prompt for prompt in joint if not prompt.obstacle(PLAIN)]) >= 8
    instructed = replace(INSTRUCTED, instruction_format="Instruct: {instruction}\nQuery: {text}")
    with_instruction = [
        p for p in joint if p.conditional.instruction and not p.obstacle(instructed)
    ]
    assert len(with_instruction) >= 8
    assert len({prompt.digest for prompt in prompts}) == len(prompts)
    assert all(prompt.description and prompt.source for prompt in prompts)


@pytest.mark.matrix
@pytest.mark.parametrize("name", bundled_names("prompts"))
def test_bundled_templates_distinguish_conditions_of_the_sample(name: str):
    for rows in read_dataset(None).splits.values():
        assert find_same_inputs(rows, load_prompt(name)) is None


# -- controls ----------------------------------------------------------------------------------

LEFT_OUT, SHUFFLED = load_prompt("control-no-condition"), load_prompt("control-shuffled")
LEFT_OUT_TEMPLATE = """
description = "d"
source = "s"
control = "left-out"
[conditional]
text = "{sentence}"
[unconditional]
text = "{sentence}"
"""


def make_rows(texts: list[tuple[str, str, str]], first: int = 1) -> Rows:
    columns = [list(column) for column in zip(*texts, strict=True)]
    numbers = np.arange(first, first + len(texts))
    return Rows(*columns, rating=np.full(len(texts), 0.5), number=numbers, file="rows.csv")


def test_control_without_condition_is_joint_and_not_subtractable():
    assert (LEFT_OUT.separate, LEFT_OUT.subtracts_condition, LEFT_OUT.subtractable) == (False,) * 3
    assert (SHUFFLED.separate, SHUFFLED.subtracts_condition, SHUFFLED.subtractable) == (
        False,
        True,
        True,
    )
    parts_read = []
    for subtract in (True, False):
        view = FeatureView((LEFT_OUT,), subtract)
        features = view.sentence_features(
            lambda prompt, part: parts_read.append(part) or np.ones((2, 3))
        )
        assert not view.subtracts
        np.testing.assert_array_equal(features, np.ones((2, 3)))
    assert parts_read == ["conditional"] * 2
    with pytest.raises(UserError, match="encodes no condition without its sentence"):
        FeatureView((LEFT_OUT,), conditioned=True)
    combined = FeatureView((load_prompt("concat-sent-cond"), LEFT_OUT))
    assert combined.subtracts


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("{sentence}", "{condition}", ["names {condition}", "only {sentence}"]),
        ('"{sentence}"\n[', '"{sentence} {condition}"\n[', ["names {condition} and {sentence}"]),
        ("{sentence}", "it", ["names none"]),
        ('"{sentence}"\n[', '"of {sentence}"\n[', ["nothing is subtracted", "same as [condit"]),
        ("left-out", "left", ["'control' is 'left'", "'left-out' or 'shuffled'"]),
        ("[conditional]", '[conditional]\ncontrol = "shuffled"', ["'conditional.control'"]),
    ],
)
def test_invalid_control_is_reported_with_its_file(
    tmp_path: Path, old: str, new: str, expected: list[str]
):
    assert old in LEFT_OUT_TEMPLATE
    with pytest.raises(UserError) as caught:
        load_template(tmp_path, LEFT_OUT_TEMPLATE.replace(old, new))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "mine.toml"))
    assert "\n" not in message
    assert all(text in message for text in expected), message


def test_control_may_have_a_context_or_an_instruction(tmp_path: Path):
    text = LEFT_OUT_TEMPLATE.replace("text =", 'instruction = "Embed"\ntext =')
    assert load_template(tmp_path, text).obstacle(PLAIN)
    separate_template = TEMPLATE.replace("Given {condition}", "").replace(
        "source", 'control = "shuffled"\nsource'
    )
    assert load_template(tmp_path, separate_template).separate


def test_only_a_control_changes_the_digest():
    assert load_prompt("concat-sent-cond").digest == "e0f2ba61c6d7b327559b7947fc3474f3"
    assert load_prompt("pair-cond").digest == "2a78c9f6453f0b131d14efbd8ad22cee"
    plain = replace(SHUFFLED, control=None)
    assert plain.digest == load_prompt("concat-sent-cond").digest
    assert len({plain.digest, SHUFFLED.digest, replace(SHUFFLED, control="left-out").digest}) == 3
    assert prompt_from_json(plain.to_json(), "run.json").control is None
    assert prompt_from_json(SHUFFLED.to_json(), "run.json") == SHUFFLED
    changed = {**SHUFFLED.to_json(), "control": None}
    with pytest.raises(UserError, match="digest"):
        prompt_from_json(changed, "run.json")


def normalize(condition: str) -> str:
    return " ".join(condition.casefold().split())


SHORT_TEXTS = st.sampled_from(["a", "b c", "B  c", "d", "A ", "ſ", "s"])


@given(
    st.lists(st.tuples(SHORT_TEXTS, SHORT_TEXTS, SHORT_TEXTS), min_size=1, max_size=12),
    st.randoms(),
)
def test_shuffled_rows_get_a_different_condition_of_another_row(
    row_texts: list[tuple[str, str, str]], shuffler: random.Random
):
    rows = make_rows(row_texts)
    if len({normalize(text) for text in rows.condition}) == 1:
        with pytest.raises(UserError, match="another row, but all"):
            input_conditions(rows, SHUFFLED)
        return
    conditions = input_conditions(rows, SHUFFLED)
    assert len(conditions) == len(rows)
    assert set(conditions) <= set(rows.condition)
    assert all(
        normalize(original) != normalize(other)
        for original, other in zip(rows.condition, conditions, strict=True)
    )
    assert input_conditions(rows, SHUFFLED) == conditions
    assert input_conditions(rows, replace(SHUFFLED, control=None)) is rows.condition
    # The order of rows has no influence, so a file that is sorted differently has the same control.
    order = list(range(len(row_texts)))
    shuffler.shuffle(order)
    reordered = input_conditions(make_rows([row_texts[i] for i in order]), SHUFFLED)
    assert reordered == [conditions[i] for i in order]


def test_conditions_are_sampled_by_their_frequency():
    row_texts = [(f"s{i}", f"t{i}", "the place" if i % 4 else f"c{i % 20}") for i in range(4_000)]
    rows = make_rows(row_texts)
    conditions = input_conditions(rows, SHUFFLED)
    counts = Counter(
        other
        for original, other in zip(rows.condition, conditions, strict=True)
        if original != "the place"
    )
    # 3,000 of the 3,800 rows that have another condition are about the place.
    assert counts["the place"] / counts.total() == pytest.approx(3_000 / 3_800, abs=0.05)
    others = Counter(other for other in conditions if other != "the place")
    assert max(others.values()) < 1.25 * min(others.values())


def test_shuffled_conditions_are_the_same_in_every_version():
    rows = read_dataset(None).splits["train"]
    # Features are stored under the prompt's digest, so another draw would mix them up.
    assert input_conditions(rows, SHUFFLED)[:3] == [
        "what colour someone is wearing",
        "the activity",
        "the location",
    ]


def test_both_sentences_get_the_same_shuffled_condition():
    splits = list(read_dataset(None).splits.values())
    all_inputs = list(SplitInputs(splits, SHUFFLED))
    assert len(all_inputs) == len(SplitInputs(splits, SHUFFLED)) == 4 * sum(map(len, splits))
    expected = []
    for rows in splits:
        inputs = render_rows(rows, SHUFFLED)
        assert inputs.first_unconditional == inputs.second_unconditional
        joint_prompt = load_prompt("concat-sent-cond")
        assert all(
            a != b for a, b in zip(inputs.first, render_rows(rows, joint_prompt).first, strict=True)
        )
        expected += zip(
            inputs.first, inputs.first_unconditional, inputs.second, inputs.second_unconditional,
            strict=True,
        )  # fmt: skip
    assert all_inputs == [item for row in expected for item in row]
    description = SplitInputs(splits, SHUFFLED).locate(all_inputs[4 * len(splits[0]) + 4 * 7])
    assert description == splits[1].describe(7)


def test_single_condition_cannot_be_shuffled():
    rows = make_rows([("a", "b", "the place"), ("c", "d", "The  place")])
    with pytest.raises(UserError, match=r"control-shuffled .* all 2 rows of a split of rows\.csv"):
        SplitInputs([rows], SHUFFLED)
    assert len(list(SplitInputs([rows], LEFT_OUT))) == 8


@pytest.fixture
def controls_run(tiny_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A run with both controls, and a head that is fitted on one of them."""
    folder = str(tmp_path / "run")
    manifest = json.loads((tiny_run / "run.json").read_text())
    command = ["extract", "--model", manifest["encoder"]["model"], "--run", folder]
    command += ["--data", manifest["data"]["source"], "--dtype", "float32", "--device", "cpu"]
    command += ["--prompt", SHUFFLED.name, LEFT_OUT.name, "concat-sent-cond"]
    assert run(command) == 0
    fit = ["fit-head", "--head", "linear", "--set", "epochs=2", "--run", folder]
    assert run([*fit, "--prompt", SHUFFLED.name]) == 0
    capsys.readouterr()
    return folder


def test_controls_are_evaluated_like_other_prompts(
    controls_run: str, capsys: pytest.CaptureFixture[str], small_rows: list[tuple]
):
    assert run(["evaluate", "--run", controls_run, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    results_by_name = {row["name"]: row for row in results}
    assert results_by_name["linear@control-shuffled"]["subtract"]
    assert not results_by_name["none@control-no-condition"]["subtract"]
    # Both rows of a pair get the same text, and so the same similarity.
    assert run(["evaluate", "--run", controls_run, "--predictions", "p.csv", "--json"]) == 0
    capsys.readouterr()
    lines = [line.split(",") for line in Path("p.csv").read_text().splitlines()]
    control_column = lines[0].index("none@control-no-condition")
    joint_column = lines[0].index("none@concat-sent-cond")
    pairs: dict[tuple[str, ...], set[str]] = {}
    for line in lines[1:]:
        pairs.setdefault(tuple(line[1:3]), set()).add(line[control_column])
    assert all(len(values) == 1 for values in pairs.values())
    assert any(
        a[joint_column] != b[joint_column] for a, b in zip(lines[1::2], lines[2::2], strict=True)
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "control-shuffled"),
        ({"head": "none", "prompt": "control-shuffled"}, "control-shuffled"),
        ({"head": "none", "prompt": "control-no-condition"}, "control-no-condition"),
    ],
)
def test_controls_are_rejected_for_texts_before_encoder_is_resolved(
    controls_run: str,
    options: dict[str, str],
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    def fail(*_: object) -> None:
        raise AssertionError("the encoder was resolved")

    monkeypatch.setattr("llmcond.runs.Run.resolve_encoder", fail)
    message = f"the prompt {name} is a control, which is only for comparisons: "
    with pytest.raises(UserError, match=message):
        llmcond.load_embedder(controls_run, **options)
    flags = [text for key, value in options.items() for text in (f"--{key}", value)]
    command = ["similarity", "a", "b", "--condition", "c", "--run", controls_run, *flags]
    assert run(command) == 2
    Path("texts.csv").write_text("sentence\ntwo men\n")
    command = [
        "embed",
        "texts.csv",
        "--out",
        "v.npy",
        "--condition-text",
        "c",
        "--run",
        controls_run,
    ]
    assert run([*command, *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 2
    assert all(message in line for line in errors)
    assert not Path("v.npy").exists()


def test_advice_for_a_rejected_control_is_accepted(controls_run: str):
    embedder = llmcond.load_embedder(
        controls_run, head="none", prompt="concat-sent-cond", device="cpu"
    )
    assert embedder.encode(["two men"], "the place").shape == (1, 32)
    with pytest.raises(UserError, match="which is only for comparisons"):
        replace(embedder, view=FeatureView((SHUFFLED,))).encode(["two men"], "the place")


# -- templates that lose the condition ---------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "rows", "collision"),
    [
        # The boundary between both texts is lost, though "red" and "red hat" are two conditions.
        (
            "{condition} {sentence}",
            [("hat is worn", "hat fits", "red"), ("is worn", "fits", "red hat")],
            (5, 6),
        ),
        (
            "{sentence}{condition}",
            [("a", "b", "x"), ("a", "b", "y"), ("a ", "b ", "c"), ("a", "b", " c")],
            (7, 8),
        ),
        # One sentence alone does not make rows the same.
        ("{condition} {sentence}", [("b c", "s", "a"), ("c", "s", "a b")], None),
        # Repeated rows are no collision, nor are conditions of other sentences.
        ("{condition} {sentence}", [("a", "b", "x"), ("a", "b", "x"), ("c", "b", "y")], None),
        ("{sentence} {condition}", [("a", "b", "x "), ("a", "b", "x"), ("a", "b", "X")], None),
    ],
)
def test_find_same_inputs_detects_collisions(
    template: str, rows: list[tuple[str, str, str]], collision: tuple[int, int] | None
):
    prompt = Prompt("d", "s", InputTemplate(template), InputTemplate("{condition}"), name="mine")
    numbered_rows = make_rows(rows, first=5)
    assert find_same_inputs(numbered_rows, prompt) == (
        collision and (collision[0] - 5, collision[1] - 5)
    )
    if collision is None:
        SplitInputs([numbered_rows], prompt).check_distinct()
        return
    with pytest.raises(UserError) as caught:
        SplitInputs([numbered_rows], prompt).check_distinct()
    message = str(caught.value)
    assert "\n" not in message
    assert f"the prompt mine gives the same input for row {collision[0]} of rows.csv" in message
    assert f"row {collision[1]} of rows.csv" in message
    second = numbered_rows.condition[collision[1] - 5]
    assert repr(second) in message


def test_find_same_inputs_reports_unchecked_template_but_no_control():
    rows = make_rows([("a", "b", "x"), ("a", "b", "y")])
    lost = Prompt("d", "s", InputTemplate("{sentence}"), InputTemplate("{sentence}"), name="lost")
    assert find_same_inputs(rows, lost) == (0, 1)
    assert find_same_inputs(rows, load_prompt("separate")) is None
    assert find_same_inputs(rows, LEFT_OUT) is None
    assert find_same_inputs(rows, SHUFFLED) is None


# -- routers -----------------------------------------------------------------------------------


def write_routed_template(tmp_path: Path, **changes: object) -> Path:
    keys = {"text": '"{sentence}"', "router": '"{condition}"', **changes}
    lines = [f"{key} = {value}" for key, value in keys.items()]
    path = tmp_path / "mine.toml"
    path.write_text(
        'description = "a"\nsource = "b"\n[conditional]\n'
        + "\n".join(lines)
        + '\n[unconditional]\ntext = "{condition}"\n'
    )
    return path


def test_router_is_a_text_with_settings(tmp_path: Path):
    prompt = load_prompt(str(write_routed_template(tmp_path, temperature=0.2, centre="false")))
    item = prompt.conditional.render("a dog {", "the mood }")
    assert (item.text, item.context) == ("a dog {", None)
    assert item.router == Router("the mood }", 0.2, False, True)
    assert not prompt.separate
    assert prompt.subtracts_condition
    assert prompt_from_json(prompt.to_json(), "record") == prompt


def test_default_router_matches_the_bundled_template(tmp_path: Path):
    prompt = load_prompt(str(write_routed_template(tmp_path)))
    assert prompt.digest == load_prompt("routed").digest


def test_router_settings_change_the_digest(tmp_path: Path):
    digests = {
        load_prompt(str(write_routed_template(tmp_path, **changes))).digest
        for changes in ({}, {"temperature": 0.2}, {"centre": "true"}, {"router": '"{condition}."'})
    }
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"router": '" "'}, "router is empty"),
        ({"router": '"{mood}"'}, r"unknown placeholder \{mood\}"),
        ({"temperature": 0.0}, "temperature is 0; it must be above 0"),
        ({"temperature": -1.0}, "temperature is -1; it must be above 0"),
        ({"temperature": "nan"}, "temperature"),
        ({"centre": '"yes"'}, "centre"),
        ({"tau": 0.1}, "unknown key 'conditional.tau'"),
    ],
)
def test_invalid_router_is_rejected(tmp_path: Path, changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        load_prompt(str(write_routed_template(tmp_path, **changes)))


@pytest.mark.parametrize("pooling", ["pooler", "latent"])
def test_router_requires_pooling_of_token_states(pooling: str):
    identity = replace(IDENTITY, pooling=pooling)
    assert "--pooling cls or mean or last" in load_prompt("routed").obstacle(identity)
    assert load_prompt("routed").obstacle(replace(IDENTITY, pooling="mean")) == ""
