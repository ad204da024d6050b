"""Inputs of queries and candidates under a prompt."""

import numpy as np
import pytest
from helpers.graphs import write_graph

from llmcond.data.datasets import DataOptions
from llmcond.encoders.spec import EncoderInput
from llmcond.errors import UserError
from llmcond.kinds.ranking.inputs import QueryInputs, QueryTexts
from llmcond.prompts import load_prompt
from llmcond.tasks import find_task

TEXTS = QueryTexts(
    sentences=["two dogs", "children"],
    conditions=["the place", "people", "inverse the place", "inverse people"],
    candidates=["two dogs", "children"],
    query_pairs=np.array([[0, 0], [0, 3], [1, 0]]),
    names=("entity", "relation", "entity"),
)


def get_texts(inputs):
    return [item.text for item in inputs]


def test_separate_features_encode_single_texts():
    inputs = QueryInputs(TEXTS, load_prompt("separate"))
    assert list(inputs.columns) == ["candidates", "sentences", "conditions"]
    assert inputs.sentences == inputs.candidates == [EncoderInput("", t) for t in TEXTS.candidates]
    assert get_texts(inputs.conditions) == TEXTS.conditions
    assert len(inputs) == len(list(inputs)) == 8
    assert len(set(inputs)) == 6


def test_joint_features_cover_queried_pairs_only():
    inputs = QueryInputs(TEXTS, load_prompt("concat-sent-cond"))
    assert list(inputs.columns) == ["candidates", "joint", "conditions"]
    joint = ["two dogs the place", "two dogs inverse people", "children the place"]
    assert get_texts(inputs.joint) == joint
    assert inputs.locate(inputs.joint[1]) == (
        "the entity 'two dogs' under the relation 'inverse people'"
    )
    assert inputs.locate(inputs.conditions[1]) == "the relation 'people'"
    assert inputs.locate(EncoderInput("", "nothing")) is None


def test_subtracted_inputs_may_contain_sentence(tmp_path):
    (tmp_path / "t.toml").write_text(
        'description = "d"\nsource = "s"\n[conditional]\ntext = "{sentence}: {condition}"\n'
        '[unconditional]\ntext = "{sentence}: anything"\n[plain]\ntext = "It is {sentence}."\n'
    )
    prompt = load_prompt(str(tmp_path / "t.toml"))
    inputs = QueryInputs(TEXTS, prompt)
    assert list(inputs.columns) == ["candidates", "joint", "sentences"]
    assert get_texts(inputs.sentences) == ["two dogs: anything", "children: anything"]
    assert get_texts(inputs.candidates) == ["It is two dogs.", "It is children."]


def test_shuffled_control_uses_other_conditions():
    inputs = QueryInputs(TEXTS, load_prompt("control-shuffled"))
    unshuffled = QueryInputs(TEXTS, load_prompt("concat-sent-cond"))
    assert get_texts(inputs.joint)[1] == "two dogs the place"
    assert all(
        shuffled_input != original_input
        for shuffled_input, original_input in zip(inputs.joint, unshuffled.joint, strict=True)
    )
    assert list(QueryInputs(TEXTS, load_prompt("control-shuffled"))) == list(inputs)


def test_graph_is_queried_in_both_directions(tmp_path):
    task = find_task("kgc")
    graph = task.read(DataOptions(str(write_graph(tmp_path))))
    texts = task.texts(graph)
    assert len(texts.conditions) == 2 * graph.n_relations == 6
    assert texts.candidates is texts.sentences
    queries = np.concatenate([graph.queries(split) for split in graph.splits])
    assert set(map(tuple, texts.query_pairs)) == set(map(tuple, queries[:, :2]))
    assert task.count_examples(graph).endswith("triples of 24 entities and 3 relations")
    graph.save(tmp_path)
    loaded = task.load(tmp_path, graph.to_json())
    assert (loaded.digest, task.texts(loaded).conditions) == (graph.digest, texts.conditions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DataOptions(columns={"label": "x"}), "--columns"),
        (DataOptions(scale={"low": 0}), "--rating-range"),
        (DataOptions(split_seed=1), "--split-seed"),
        (DataOptions(extra=("note",)), "'note'"),
        (DataOptions([{"head": "a"}]), "data is list, but the task kgc reads a folder"),
    ],
)
def test_options_for_rated_rows_are_rejected(options, message):
    with pytest.raises(UserError, match=message):
        find_task("kgc").read(options)
