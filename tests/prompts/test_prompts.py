"""Prompt templates: rendering, validation, digests, controls, routers and their preview."""

import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import run_json, run_rejected
from helpers.identities import IDENTITY
from hypothesis import given
from hypothesis import strategies as st

import llmcond
from llmcond.base.errors import UserError
from llmcond.base.package import bundled_names
from llmcond.cli import run
from llmcond.data.datasets import read_dataset
from llmcond.data.rows import Rows
from llmcond.encoders.spec import EncoderInput, Router
from llmcond.features.view import FeatureView
from llmcond.prompts import InputTemplate, Prompt, load_prompt, prompt_from_json
from llmcond.prompts.template import SplitInputs, input_conditions, render_rows

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
LEFT_OUT_TEMPLATE = """
description = "d"
source = "s"
control = "left-out"
[conditional]
text = "{sentence}"
[unconditional]
text = "{sentence}"
"""
ROUTED_TEMPLATE = TEMPLATE.replace('instruction = "Given {condition}"', 'router = "{condition}"')
LEFT_OUT, SHUFFLED = load_prompt("control-no-condition"), load_prompt("control-shuffled")
TRAIN = read_dataset(None).splits["train"]


def load_template(text: str) -> Prompt:
    Path("mine.toml").write_text(text, encoding="utf-8")
    return load_prompt("mine.toml")


def make_rows(texts: list[tuple[str, str, str]], first: int = 1) -> Rows:
    columns = [list(column) for column in zip(*texts, strict=True)]
    numbers = np.arange(first, first + len(texts))
    return Rows(*columns, rating=np.full(len(texts), 0.5), number=numbers, file="rows.csv")


# -- rendering -------------------------------------------------------------------------------------

#: Conditional and unconditional inputs of bundled templates for SENTENCE and CONDITION. Each is a
#: text, or a pair of an instruction or context and a text. The first four are those of CASE.
RENDERED = {
    "cond": (
        (
            f"Retrieve semantically similar texts to the Condition, given the Sentence: {SENTENCE}",
            CONDITION,
        ),
        ("Retrieve semantically similar texts to a given Sentence", CONDITION),
    ),
    "sent": (
        (
            "Retrieve semantically similar texts to the Sentence, given the Condition: "
            f"{CONDITION}",
            SENTENCE,
        ),
        ("Retrieve semantically similar texts to a given Sentence", CONDITION),
    ),
    "concat-cond-sent": (f"{CONDITION} {SENTENCE}", CONDITION),
    "concat-sent-cond": (f"{SENTENCE} {CONDITION}", CONDITION),
    "pair-cond": ((SENTENCE, CONDITION), ("", CONDITION)),
    "eol": (
        f'This sentence: "{SENTENCE}" means in one word regarding {CONDITION}:"',
        f'This sentence means in one word regarding {CONDITION}:"',
    ),
    "control-no-condition": (SENTENCE, SENTENCE),
}


def test_bundled_templates_render_as_expected():
    for name, expected in RENDERED.items():
        prompt = load_prompt(name)
        for part, inputs in zip((prompt.conditional, prompt.unconditional), expected, strict=True):
            item = part.render(SENTENCE, CONDITION)
            first = item.instruction if item.context is None else item.context
            assert (first, item.text) == (("", inputs) if isinstance(inputs, str) else inputs)
    # An empty context differs from none: both vectors are pooled over the condition's tokens only.
    assert load_prompt("pair-cond").unconditional.render("", "").context == ""
    assert load_prompt("cond").unconditional.render("", "").context is None


def test_bundled_templates_are_restored_and_distinguish_conditions():
    prompts = [load_prompt(name) for name in bundled_names("prompts")]
    for prompt in prompts:
        assert prompt_from_json(prompt.to_json(), "manifest.json") == prompt
        SplitInputs([TRAIN], prompt).check_distinct()
        assert prompt.subtracts_condition == (prompt.control != "left-out")
    assert len({prompt.digest for prompt in prompts}) == len(prompts)


@given(st.text(), st.text())
def test_texts_with_braces_are_inserted_unchanged(sentence: str, condition: str):
    part = InputTemplate(text="{condition}|{sentence}", instruction="{{x}}: {sentence}")
    expected = EncoderInput(f"{{x}}: {sentence}", f"{condition}|{sentence}")
    assert part.render(sentence, condition) == expected


PLAIN = IDENTITY
INSTRUCTED = replace(PLAIN, instruction_format="{instruction} {text}", special_tokens="{text} </s>")


def test_obstacle_names_why_an_encoder_does_not_suit():
    for name, encoder, obstacle in (
        ("cond", PLAIN, "takes none"),
        ("pair-cond", INSTRUCTED, "reads single texts only"),
        ("pair-cond", replace(PLAIN, pooling="cls"), "--pooling mean"),
        ("routed", replace(PLAIN, pooling="latent"), "--pooling cls or mean or last"),
    ):
        assert obstacle in load_prompt(name).obstacle(encoder)
    assert load_prompt("pair-cond").obstacle(PLAIN) == load_prompt("routed").obstacle(PLAIN) == ""


# -- validation ------------------------------------------------------------------------------------


def test_invalid_template_is_reported_with_its_file():
    for template, old, new, expected in (
        (TEMPLATE, "{sentence}", "{sentense}", ["{sentense}", "Did you mean 'sentence'"]),
        (TEMPLATE, "{sentence}", "{sentence", ["[conditional] text", "{{ and }}"]),
        (TEMPLATE, "{sentence}", "it", ["lacks the placeholder {sentence}", "separate"]),
        (TEMPLATE, '"{condition}"', '"{condition} {sentence}"', ["{condition} and {sentence}"]),
        (TEMPLATE, '"{condition}"', '"nothing"', ["[unconditional] names none", "exactly one"]),
        (TEMPLATE, 'source = "s"', 'sauce = "s"', ["unknown key 'sauce'", "Did you mean 'source'"]),
        (
            TEMPLATE,
            "[unconditional]\n",
            '[unconditional]\ntxt = ""\n',
            ["unknown key 'unconditional.txt'", "Did you mean 'text'", "text, instruction"],
        ),
        (TEMPLATE, "instruction =", "context =", ['context = "" reads nothing before']),
        (TEMPLATE, "text", 'context = ""\ntext', ["both an instruction and a context"]),
        (LEFT_OUT_TEMPLATE, "{sentence}", "{condition}", ["names {condition}", "only {sentence}"]),
        (LEFT_OUT_TEMPLATE, '"{sentence}"\n[', '"of {sentence}"\n[', ["nothing is subtracted"]),
        (ROUTED_TEMPLATE, 'router = "{condition}"', 'router = " "', ["router is empty"]),
    ):
        assert old in template
        with pytest.raises(UserError) as caught:
            load_template(template.replace(old, new))
        message = str(caught.value)
        assert message.startswith("mine.toml")
        assert "\n" not in message
        assert all(text in message for text in expected), message


def test_digest_depends_on_encoded_strings_and_settings_only():
    assert load_prompt("concat-sent-cond").digest == "e0f2ba61c6d7b327559b7947fc3474f3"
    assert load_prompt("pair-cond").digest == "2a78c9f6453f0b131d14efbd8ad22cee"
    prompt = load_prompt("cond")
    assert replace(prompt, name="n", description="d", source="s").digest == prompt.digest
    assert load_template(ROUTED_TEMPLATE).digest == load_prompt("routed").digest
    assert replace(SHUFFLED, control=None).digest == load_prompt("concat-sent-cond").digest
    both, swapped = InputTemplate("a", "b"), InputTemplate("b", "a")
    digests = {
        Prompt("d", "s", both, both).digest,
        Prompt("d", "s", swapped, swapped).digest,
        Prompt("d", "s", both, InputTemplate("a", context="b")).digest,
        SHUFFLED.digest,
        replace(SHUFFLED, control="left-out").digest,
        *(replace(SHUFFLED, plain=both, control=control).digest for control in (None, "shuffled")),
    }
    assert len(digests) == 7
    texts = [
        TEMPLATE,
        TEMPLATE.replace("Given {condition}", "Given: {condition}"),
        TEMPLATE.replace("[unconditional]\n", '[unconditional]\ninstruction = "I"\n'),
        ROUTED_TEMPLATE,
        ROUTED_TEMPLATE.replace("text", "temperature = 0.2\ntext", 1),
    ]
    assert len({load_template(text).digest for text in texts}) == len(texts)


def test_changed_record_is_rejected():
    for change, message in (
        ({"conditional": {"text": "{sentence} {condition}", "instruction": ""}}, "digest"),
        ({"control": "shuffled"}, "digest"),
        ({"unconditional": {"text": "{word}", "instruction": ""}}, "unknown placeholder"),
    ):
        record = {**load_prompt("cond").to_json(), **change}
        with pytest.raises(UserError, match=f"^manifest.json.*{message}"):
            prompt_from_json(record, "manifest.json")


def test_templates_are_separate_or_joint_and_may_have_a_router():
    assert not load_template(TEMPLATE).separate
    separate = load_template(TEMPLATE.replace("Given {condition}", "Given"))
    assert separate.separate
    assert separate.sentence_part == separate.conditional
    routed = load_template(ROUTED_TEMPLATE.replace("text", "temperature = 0.2\ntext", 1))
    item = routed.conditional.render("a dog {", "the mood }")
    assert (item.text, item.context) == ("a dog {", None)
    assert item.router == Router("the mood }", 0.2, False, True)
    assert (routed.separate, routed.subtracts_condition) == (False, True)
    assert prompt_from_json(routed.to_json(), "record") == routed


# -- controls --------------------------------------------------------------------------------------


def test_control_without_condition_is_never_subtracted():
    assert (LEFT_OUT.separate, LEFT_OUT.subtracts_condition, LEFT_OUT.subtractable) == (False,) * 3
    assert (SHUFFLED.separate, SHUFFLED.subtractable) == (False, True)
    view = FeatureView((LEFT_OUT,))
    assert not view.subtracts
    assert view.required_parts() == [(LEFT_OUT, "conditional")]
    with pytest.raises(UserError, match="encodes no condition without its sentence"):
        FeatureView((LEFT_OUT,), conditioned=True)
    assert FeatureView((load_prompt("concat-sent-cond"), LEFT_OUT)).subtracts


SHORT_TEXTS = st.sampled_from(["a", "b c", "B  c", "d", "A ", "ſ", "s"])


@given(
    st.lists(st.tuples(SHORT_TEXTS, SHORT_TEXTS, SHORT_TEXTS), min_size=1, max_size=12),
    st.randoms(),
)
def test_shuffled_rows_get_a_different_condition_of_another_row(row_texts, shuffler: random.Random):
    def normalize(condition: str) -> str:
        return " ".join(condition.casefold().split())

    rows = make_rows(row_texts)
    if len({normalize(text) for text in rows.condition}) == 1:
        with pytest.raises(UserError, match="another row, but all"):
            input_conditions(rows, SHUFFLED)
        return
    conditions = input_conditions(rows, SHUFFLED)
    assert set(conditions) <= set(rows.condition)
    assert all(
        normalize(original) != normalize(other)
        for original, other in zip(rows.condition, conditions, strict=True)
    )
    # The order of rows has no influence, so a file that is sorted differently has the same control.
    order = list(range(len(row_texts)))
    shuffler.shuffle(order)
    reordered = input_conditions(make_rows([row_texts[i] for i in order]), SHUFFLED)
    assert reordered == [conditions[i] for i in order]


def test_both_sentences_get_the_same_shuffled_condition():
    # Features are stored under the prompt's digest, so another draw would mix them up.
    assert input_conditions(TRAIN, SHUFFLED)[:3] == [
        "what colour someone is wearing",
        "the activity",
        "the location",
    ]
    splits = list(read_dataset(None).splits.values())
    all_inputs = list(SplitInputs(splits, SHUFFLED))
    assert len(all_inputs) == len(SplitInputs(splits, SHUFFLED)) == 4 * sum(map(len, splits))
    inputs = render_rows(TRAIN, SHUFFLED)
    assert inputs.first_unconditional == inputs.second_unconditional
    columns = (
        inputs.first, inputs.first_unconditional, inputs.second, inputs.second_unconditional,
    )  # fmt: skip
    expected = [item for row in zip(*columns, strict=True) for item in row]
    assert all_inputs[: len(expected)] == expected
    description = SplitInputs(splits, SHUFFLED).locate(all_inputs[4 * len(splits[0]) + 4 * 7])
    assert description == splits[1].describe(7)


def test_controls_are_evaluated_but_embed_no_texts(model, data, capsys, monkeypatch):
    controls_run, prompts = "run", [SHUFFLED.name, LEFT_OUT.name, "concat-sent-cond"]
    options = {"dtype": "float32", "device": "cpu"}
    llmcond.extract(model=model, data=str(data), run=controls_run, prompt=prompts, **options)
    fit = {"run": controls_run, "prompt": SHUFFLED.name, "set": {"epochs": "2"}}
    llmcond.fit_head(head="linear", **fit)
    evaluate = ("evaluate", "--run", controls_run, "--predictions", "p.csv")
    subtract = {row["name"]: row["subtract"] for row in run_json(capsys, *evaluate)["results"]}
    assert subtract["linear@control-shuffled"]
    assert not subtract["none@control-no-condition"]
    # Both rows of a pair get the same text, and so the same similarity.
    header, *lines = (line.split(",") for line in Path("p.csv").read_text().splitlines())
    control = [line[header.index("none@control-no-condition")] for line in lines]
    joint = [line[header.index("none@concat-sent-cond")] for line in lines]
    assert control[::2] == control[1::2]
    assert joint[::2] != joint[1::2]

    monkeypatch.setattr("llmcond.runs.Run.resolve_encoder", None)  # It is not even resolved.
    for options in ({}, {"head": "none", "prompt": LEFT_OUT.name}):
        name = options.get("prompt", SHUFFLED.name)
        message = f"the prompt {name} is a control, which is only for comparisons: "
        with pytest.raises(UserError, match=message):
            llmcond.load_embedder(controls_run, **options)


# -- templates that lose the condition -------------------------------------------------------------


def test_rows_with_the_same_input_are_reported():
    def check(rows: list[tuple[str, str, str]], prompt: Prompt | str) -> None:
        if isinstance(prompt, str):
            parts = InputTemplate(prompt), InputTemplate("{condition}")
            prompt = Prompt("d", "s", *parts, name="mine")
        SplitInputs([make_rows(rows, first=5)], prompt).check_distinct()

    both = "{condition} {sentence}"
    # The boundary between both texts is lost, though "red" and "red hat" are two conditions.
    with pytest.raises(UserError) as caught:
        check([("hat is worn", "hat fits", "red"), ("is worn", "fits", "red hat")], both)
    assert str(caught.value).startswith(
        "the prompt mine gives the same input for row 5 of rows.csv and row 6 of rows.csv, "
        "although their conditions differ ('red' and 'red hat'). Put words"
    )
    # One sentence alone does not make rows the same.
    check([("b c", "s", "a"), ("c", "s", "a b")], both)
    # Repeated rows are no collision, nor are conditions of other sentences.
    check([("a", "b", "x"), ("a", "b", "x"), ("c", "b", "y")], both)
    for prompt in (load_prompt("separate"), LEFT_OUT, SHUFFLED):
        check([("a", "b", "x"), ("a", "b", "y")], prompt)
    with pytest.raises(UserError, match=r"control-shuffled .* all 2 rows of a split of rows\.csv"):
        check([("a", "b", "the place"), ("c", "d", "The  place")], SHUFFLED)


# -- llmcond prompts show --------------------------------------------------------------------------


def test_show_reads_the_fields_of_a_template(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"s{i},t{i},the place,{i % 5 + 1},lang{i}" for i in range(9)]
    Path("rows.csv").write_text("sentence1,sentence2,condition,label,lang\n" + "\n".join(rows))
    texts = 'text = "{sentence} {condition} {lang}"', 'text = "{condition}"'
    parts = 'description = "d"', 'source = "s"', 'fields = ["lang"]'
    lines = [*parts, "[conditional]", texts[0], "[unconditional]", texts[1]]
    Path("mine.toml").write_text("\n".join(lines))
    report = run_json(capsys, "prompts", "show", "mine.toml", "--data", "rows.csv")
    assert re.fullmatch(r"s(\d) the place lang\1", report["inputs"][0]["text"])


def show_text(capsys, *arguments) -> str:
    assert run(["prompts", "show", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_exact_texts_of_a_row_are_shown(capsys):
    report = run_json(capsys, "prompts", "show", "concat-sent-cond", "--row", 3)
    first, second, condition = TRAIN.sentence1[2], TRAIN.sentence2[2], TRAIN.condition[2]
    assert (report["file"], report["split"], report["row"]) == ("train.csv", "train", 3)
    keys = ("part", "sentence", "instruction", "context", "text")
    assert [tuple(item[key] for key in keys) for item in report["inputs"]] == [
        ("conditional", 1, "", None, f"{first} {condition}"),
        ("conditional", 2, "", None, f"{second} {condition}"),
        ("unconditional", None, "", None, condition),
    ]
    assert report["encoder"] is None
    out = show_text(capsys, "concat-sent-cond", "--row", "3")
    # A text is printed on a single line, however long it is.
    assert f"text:        {first} {condition}\n" in out
    assert out.startswith("prompt concat-sent-cond: The sentence, then the condition")
    assert "row 3 of train.csv, train\n" in out
    load_template(TEMPLATE.replace('text = "{condition}"', 'text = "{sentence}"'))
    inputs = run_json(capsys, "prompts", "show", "mine.toml", "--split", "test")["inputs"][2:]
    rows = read_dataset(None).splits["test"]
    assert [item["text"] for item in inputs] == [rows.sentence1[0], rows.sentence2[0]]


def test_tokens_and_marks_match_extraction(capsys, minilm):
    show = ("prompts", "show", "pair-cond", "--row", 3, "--model", "minilm")
    report = run_json(capsys, *show)
    inputs = render_rows(TRAIN, load_prompt("pair-cond"))
    items = [inputs.first[2], inputs.second[2], inputs.first_unconditional[2]]
    for item, row in zip(report["inputs"], minilm._tokenizer(items), strict=True):
        assert item["tokens"] == minilm._tokenizer.strings(row)
        marked = [i for i, pooled in enumerate(item["pooled"]) if pooled]
        assert marked == list(range(row.first, row.last))
        assert (item["n_tokens"], item["cut"]) == (len(item["tokens"]), [])
    assert (report["encoder"]["name"], report["encoder"]["pooling"]) == ("minilm", "mean")
    out = show_text(capsys, *show[2:]).splitlines()
    line_number = next(i for i, line in enumerate(out) if "[CLS]" in line)
    tokens, marks = out[line_number], out[line_number + 1]
    assert tokens[marks.index("^") : len(marks)] == " ".join(items[0].text.split())
    assert set(marks) == {"^", " "}
    assert out[line_number + 2].strip() == f"{report['inputs'][0]['n_tokens']} tokens, 5 pooled"
    # A context is cut before the text.
    item = run_json(capsys, *show, "--max-length", 10)["inputs"][0]
    assert item["tokens"] == "[CLS] in this [SEP] the mood of the people [SEP]".split()
    cut = "scene we see one gentleman reading a book on an over ##cast day , looking excited ."
    assert item["cut"] == cut.split()


def test_invalid_arguments_are_reported_in_one_line(capsys):
    for arguments, expected in (
        (["con"], ["unknown prompt 'con'", "'cond'", "llmcond prompts"]),
        (["cond", "--row", "0"], ["no row 0 in the train split of train.csv", "1 to 2800"]),
        (["cond", "--model", "minilm"], ["cond does not work with minilm", "takes none"]),
        (["cond", "--pooling", "mean"], ["Name it with --model NAME"]),
    ):
        line = run_rejected(capsys, "prompts", "show", *arguments)
        assert all(text in line for text in expected), line


def test_listing_names_controls(capsys):
    rows = {row["name"]: row for row in run_json(capsys, "prompts")["prompts"]}
    assert list(rows) == bundled_names("prompts")
    controls = {name: row["control"] for name, row in rows.items() if row["control"]}
    assert controls == {SHUFFLED.name: "shuffled", LEFT_OUT.name: "left-out"}


def test_markup_and_escapes_in_texts_are_not_interpreted(capsys, write_rows):
    rows = [
        ("[red]two[/red] :dog: \x1b[31m", f"s{i}", "[bold]the\nplace[/bold]", 3) for i in range(6)
    ]
    out = show_text(capsys, "concat-sent-cond", "--data", write_rows(rows), "--row", 1)
    assert r"text:        [red]two[/red] :dog: \x1b[31m [bold]the place[/bold]" in out
    assert "\x1b" not in out
