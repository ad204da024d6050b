"""Similarities of given sentences and answers before and after heads."""

import json
import shutil

import pytest
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.cli import run
from llmcond.encoders import EncoderOptions
from llmcond.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

FIRST, SECOND = PAIR = ("A girl in an orange dress.", "A girl in gray.")
#: The first question has both answers, the second only that of the second sentence.
ROWS = [
    {"sentence1": FIRST, "sentence2": SECOND, "condition": "color", "answer1": "orange"},
    {"sentence1": FIRST, "sentence2": SECOND, "condition": "game", "answer1": ""},
]
ROWS = [{**row, "answer2": answer} for row, answer in zip(ROWS, ("gray", "tennis"), strict=True)]
#: The texts that are compared, with their conditions.
COMPARISONS = [
    (FIRST, SECOND, None),
    (FIRST, SECOND, "color"),
    (FIRST, "orange", "color"),
    (SECOND, "gray", "color"),
    (FIRST, SECOND, "game"),
    (SECOND, "tennis", "game"),
]


def analyse(folder, answers=ROWS, **options):
    return llmcond.analyse(run=folder, what=["answers"], answers=answers, **options)["answers"]


def texts_of(head):
    return [(row["text1"], row["text2"], row["condition"]) for row in head["rows"]]


def test_similarities_equal_those_of_embedder(fitted):
    (head,) = analyse(fitted)
    assert texts_of(head) == COMPARISONS
    columns = list(zip(*COMPARISONS[1:], strict=True))
    for key, name in (("before", "none"), ("after", head["name"])):
        expected = llmcond.load_embedder(fitted, name).similarity(*columns)
        assert [row[key] for row in head["rows"][1:]] == pytest.approx(expected.tolist(), abs=1e-5)
        assert len({round(row[key], 6) for row in head["rows"]}) >= 4


def test_sentences_are_also_compared_without_condition(fitted):
    embedder = llmcond.load_embedder(fitted, "none")
    # The prompt encodes a condition alone as its text.
    alone = [llmcond.EncoderInput(instruction="", text=text) for text in PAIR]
    vectors = embedder.encoder.encode(alone)
    fitted_head = llmcond.load_embedder(fitted, "linear").head
    (head,) = analyse(fitted)
    before, after = (head["rows"][0][key] for key in ("before", "after"))
    assert before == pytest.approx(float(embedder.compare(vectors[:1], vectors[1:])[0]), abs=1e-5)
    embedded = fitted_head.transform(vectors)
    expected = float(fitted_head.compare(embedded[:1], embedded[1:])[0])
    assert after == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("head", ["hypernet", "hadamard"])
def test_heads_that_take_conditions_have_no_similarity_without(run_copy, head):
    model = json.loads((run_copy / "run.json").read_text())["encoder"]["model"]
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
    llmcond.extract(model=model, **vars(options), run=run_copy, prompt=["separate"])
    changes = {"epochs": "1", **({"rank": "4"} if head == "hypernet" else {})}
    llmcond.fit_head(run=run_copy, head=head, prompt="separate", set=changes, device="cpu")
    (result,) = analyse(run_copy, [{key: ROWS[0][key] for key in list(ROWS[0])[:3]}])
    assert texts_of(result) == COMPARISONS[:2]
    alone, under_condition = result["rows"]
    assert alone["after"] is None
    assert -1 <= under_condition["after"] <= 1
    assert -1 <= alone["before"] < 1


def test_file_of_answers_gives_table(capsys, fitted, tmp_path):
    path = tmp_path / "answers.csv"
    lines = [",".join(row.values()) for row in ROWS]
    path.write_text("\n".join([",".join(ROWS[0]), *lines, ""]))
    command = ["analyse", "--run", str(fitted), "--what", "answers", "--answers", str(path)]
    assert run([*command, "--format", "markdown"]) == 0
    table = capsys.readouterr().out
    assert "Similarity before (none@concat-sent-cond) and after (linear@concat-sent-cond)" in table
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    (head,) = run_json(capsys, *command)["answers"]
    shown = [[cell.strip() for cell in row] for row in rows[2:]]
    assert [tuple(row[:3]) for row in shown] == [(a, b, c or "–") for a, b, c in COMPARISONS]
    assert [row[3] for row in shown] == [f"{row['before']:.4f}" for row in head["rows"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"what": ["answers"]}, "the analysis answers needs the texts to compare"),
        ({"what": ["isotropy"], "answers": ROWS}, "--answers is only for the analysis answers"),
        ({"answers": [{**ROWS[0], "condition": " "}]}, "condition is empty"),
        ({"answers": [{"sentence1": "a", "sentence2": "b"}]}, "has no column 'condition'"),
    ],
)
def test_invalid_request_is_rejected(fitted, options, message):
    with pytest.raises(UserError, match=message):
        llmcond.analyse(run=fitted, **options)


def test_missing_file_of_answers_is_rejected(capsys, fitted):
    message = run_rejected(capsys, "analyse", "--run", fitted, "--answers", "missing.csv")
    assert message.startswith("missing.csv does not exist")


def test_analyses_without_answers_do_not_need_encoder(fitted, tmp_path):
    folder = shutil.copytree(fitted, tmp_path / "run")
    manifest = json.loads((folder / "run.json").read_text())
    manifest["encoder"]["model"] = str(tmp_path / "gone")
    (folder / "run.json").write_text(json.dumps(manifest))
    assert "answers" not in llmcond.analyse(run=folder, out=tmp_path, conditions=2)
    with pytest.raises(UserError, match="gone"):
        analyse(folder)
