"""Tasks define how rows are read and which texts have a condition."""

from pathlib import Path

import numpy as np
import pytest

from llmcond import plugins
from llmcond.data.datasets import Columns, DataOptions, RatingScale
from llmcond.data.rows import load_rows, save_rows
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.prompts import load_prompt
from llmcond.prompts.inputs import SplitInputs, render_rows
from llmcond.tasks import find_task

ANSWERS = """
from llmcond.data.datasets import Columns, RatingScale
from llmcond.tasks import Task


class Answers(Task):
    columns = Columns(
        sentence1="question", sentence2="answer", condition="topic", label="relevance"
    )
    scale = RatingScale(low=0, high=1, unrated=-1)
    conditioned = (True, False)
    metrics = ("accuracy",)
"""

ROWS = [
    {"question": f"q{i}", "answer": f"a{i}", "topic": "rain", "relevance": i % 2, "note": f"n{i}"}
    for i in range(8)
]


@pytest.fixture
def answers(tmp_path: Path) -> str:
    (tmp_path / "my_task.py").write_text(ANSWERS)
    return f"{tmp_path}/my_task.py:Answers"


def test_default_task_reads_bundled_sample():
    dataset = find_task("csts").read(DataOptions())
    assert dataset.source == "sample"
    assert dataset.splits["train"].conditioned == (True, True)


def test_custom_task_reads_its_columns_and_scale(answers):
    task = find_task(answers)
    assert task.name == "my_task.py:Answers"
    dataset = task.read(DataOptions(ROWS))
    rows = dataset.splits["train"]
    assert dataset.source == "rows in memory"
    assert set(rows.sentence1) < {row["question"] for row in ROWS}
    assert set(rows.rating) <= {0.0, 1.0}
    assert rows.conditioned == (True, False)


def test_missing_columns_and_scale_default_to_those_of_task(answers):
    rows = [{**row, "score": row["relevance"] + 1} for row in ROWS]
    options = DataOptions(rows, columns={"label": "score"}, scale={"high": 3})
    dataset = find_task(answers).read(options)
    assert dataset.columns == Columns("question", "answer", "topic", "score")
    assert dataset.scale == RatingScale(low=0, high=3, unrated=-1)
    defaults = DataOptions(None, {"label": "mark"}, {"low": 0, "unrated": 9}, 4, ("note",))
    merged = options.with_defaults(defaults)
    assert merged.columns == {"label": "score"}
    assert merged.scale == {"low": 0, "high": 3, "unrated": 9}
    assert (merged.split_seed, merged.extra) == (4, ("note",))


def test_unconditioned_text_is_rendered_unchanged_without_subtraction(answers):
    rows = find_task(answers).read(DataOptions(ROWS)).splits["train"]
    inputs = render_rows(rows, load_prompt("concat-sent-cond"))
    assert inputs.second == [EncoderInput("", text) for text in rows.sentence2]
    assert inputs.second_unconditional == inputs.second
    assert all("rain" in item.text for item in inputs.first)
    split_inputs = set(SplitInputs([rows], load_prompt("concat-sent-cond")))
    assert split_inputs == {*inputs.first, *inputs.first_unconditional, *inputs.second}


def test_template_may_render_unconditioned_texts(answers, tmp_path):
    bundled = (Path(__file__).parents[2] / "prompts" / "concat-sent-cond.toml").read_text()
    (tmp_path / "t.toml").write_text(f'{bundled}\n[plain]\ntext = "Answer: {{sentence}}"\n')
    rows = find_task(answers).read(DataOptions(ROWS)).splits["train"]
    prompt = load_prompt(str(tmp_path / "t.toml"))
    assert render_rows(rows, prompt).second[0].text == f"Answer: {rows.sentence2[0]}"
    assert prompt.digest != load_prompt("concat-sent-cond").digest
    (tmp_path / "t.toml").write_text(f'{bundled}\n[plain]\ntext = "{{condition}}"\n')
    with pytest.raises(UserError, match="plain"):
        load_prompt(str(tmp_path / "t.toml"))


def test_template_reads_extra_columns(answers, tmp_path):
    (tmp_path / "t.toml").write_text(
        'description = "d"\nsource = "s"\nfields = ["note"]\n'
        '[conditional]\ntext = "{sentence} ({note}) {condition}"\n'
        '[unconditional]\ntext = "{condition}"\n'
    )
    prompt = load_prompt(str(tmp_path / "t.toml"))
    task = find_task(answers)
    rows = task.read(DataOptions(ROWS, extra=prompt.fields)).splits["train"]
    save_rows(tmp_path / "rows.parquet", {"train": rows})
    loaded = load_rows(tmp_path / "rows.parquet", task.conditioned)["train"]
    for split_rows in (rows, loaded):
        number = split_rows.sentence1[0].removeprefix("q")
        assert render_rows(split_rows, prompt).first[0].text == f"q{number} (n{number}) rain"
    with pytest.raises(UserError, match=r"'note'.*read without it"):
        render_rows(task.read(DataOptions(ROWS)).splits["train"], prompt)
    (tmp_path / "t.toml").write_text((tmp_path / "t.toml").read_text().replace("{note}", "{nite}"))
    with pytest.raises(UserError, match=r"nite.*note.*fields"):
        load_prompt(str(tmp_path / "t.toml"))


@pytest.mark.parametrize("shape", ["list", "columns", "arrow", "pandas", "splits"])
def test_rows_in_memory_are_read(shape):
    import pandas as pd
    import pyarrow as pa

    names = ("sentence1", "sentence2", "condition", "label")
    rows = [dict(zip(names, (f"a{i}", f"b{i}", "c", 1 + i % 5), strict=True)) for i in range(10)]
    source = {
        "list": rows,
        "columns": {name: [row[name] for row in rows] for name in names},
        "arrow": pa.Table.from_pylist(rows),
        "pandas": pd.DataFrame(rows),
        "splits": {"train": rows[:6], "validation": rows[6:8], "test": rows[8:]},
    }[shape]
    dataset = DataOptions(source).read()
    texts = [text for split in dataset.splits.values() for text in split.sentence1]
    assert sorted(texts) == sorted(row["sentence1"] for row in rows)
    if shape == "splits":
        assert [len(split) for split in dataset.splits.values()] == [6, 2, 2]
        assert np.allclose(dataset.splits["train"].rating, [0, 0.25, 0.5, 0.75, 1, 0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (7, "int 7; expected a path"),
        ([1, 2], "row 1 .*is 1, not a text|has no column|list of texts, without a column"),
        ([], "there are no rows"),
        ([{"sentence1": "a"}], "no column 'sentence2'"),
        ({"sentence1": ["a"], "sentence2": []}, r"\[0, 1\] rows"),
    ],
)
def test_invalid_tables_are_rejected(source, message):
    with pytest.raises(UserError, match=message):
        DataOptions(source).read()


def test_record_alone_never_runs_code(answers, monkeypatch):
    monkeypatch.setattr(plugins, "_REGISTERED", {})
    with pytest.raises(UserError, match="--plugin"):
        find_task("my_task.py:Answers", "the run r")
    find_task(answers)
    assert find_task("my_task.py:Answers", "the run r").metrics == ("accuracy",)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kitchen", "there is no task 'kitchen'"),
        ("missing.py:Task", "does not exist"),
        ("json:loads", "is not a task"),
        ("json:nothing", "has no 'nothing'"),
        (":x", "is not a name of code"),
    ],
)
def test_invalid_task_names_are_rejected(name, message):
    with pytest.raises(UserError, match=message):
        find_task(name)
