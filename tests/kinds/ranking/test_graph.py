"""Knowledge graphs: file formats, invalid input, known tails, hops, reversed edges and subsets."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.graphs import random_graph

from llmcond.base.errors import UserError
from llmcond.encoders.spec import EncoderInput
from llmcond.evaluation.results import rank
from llmcond.kinds.ranking.examples import (
    TrainGraph,
    fit_reverse_weights,
    query_subsets,
    relation_categories,
    relation_subsets,
)
from llmcond.kinds.ranking.graph import (
    Graph,
    KnownTriples,
    QueryInputs,
    QueryTexts,
    both_directions,
    read_graph,
)
from llmcond.prompts import load_prompt

TRAIN = ["01\tlikes\t02", "02\tlikes\t03", "03\towns\t01"]


def write_files(folder: Path, files: Mapping[str, list[str] | None] | None = None) -> Path:
    """Write a small graph; ``files`` replaces the lines of some files, or omits them with None."""
    folder.mkdir(exist_ok=True)
    defaults = {
        "train.tsv": TRAIN,
        "valid.tsv": ["02\tlikes\t01"],
        "test.tsv": ["01\towns\t03"],
        "entities.tsv": ["01\tAda\ta cook", "02\tBen", "03\tCleo\tCleo the cat"],
        "relations.tsv": ["likes\tis fond of\tis dear to", "owns\tis the owner of"],
    }
    for name, lines in (defaults | dict(files or {})).items():
        if lines is not None:
            (folder / name).write_bytes("".join(f"{line}\n" for line in lines).encode())
    return folder


# -- reading ------------------------------------------------------------------------------------


def test_triples_are_indices_and_texts_join_name_and_description(tmp_path: Path):
    graph = read_graph(write_files(tmp_path))
    assert graph.entities.ids == ["01", "02", "03"]
    assert graph.entities.names == ["Ada", "Ben", "Cleo"]
    # A name at the start of the description is not repeated.
    assert graph.entities.texts == ["Ada: a cook", "Ben", "Cleo: the cat"]
    assert graph.relations.texts == ["is fond of", "is the owner of"]
    assert graph.relations.inverse == ["is dear to", "inverse is the owner of"]
    assert list(graph.splits) == ["train", "dev", "test"]
    assert graph.splits["train"].dtype == np.int32
    assert graph.splits["train"].tolist() == [[0, 0, 1], [1, 0, 2], [2, 1, 0]]
    assert graph.queries("test").tolist() == [[0, 1, 2], [2, 3, 0]]
    known = graph.known
    assert len(known._codes) == 10
    assert all(known.contains(both_directions(split, 2)).all() for split in graph.splits.values())


def test_header_is_reported_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    expected = read_graph(write_files(tmp_path))
    path = tmp_path / "train.tsv"
    path.write_bytes(b"\xef\xbb\xbf\nSubject\tPredicate\tObject\n" + path.read_bytes())
    caplog.clear()
    with caplog.at_level("INFO", "llmcond"):
        assert read_graph(tmp_path).digest == expected.digest
    message = f"{path}: the first line is a header, and left out: Subject, Predicate, Object"
    assert caplog.messages == [message]


ENTITY_FILES = {
    "KG-BERT": (
        {"entity2text.txt": ['01\tstool, waste "matter', "02\tsaxony, in Germany", "03\ta, b, c"]},
        ['stool: waste "matter', "saxony: in Germany", "a: b, c"],
    ),
    "SimKGC WordNet": (
        {"wordnet-mlj12-definitions.txt": [
            "01\t__family_alcidae_NN_1\tauks", "02\t__stool_NN_2\twaste", "03\t__run_VB_1\tmove"
        ]},
        ["family alcidae: auks", "stool: waste", "run: move"],
    ),
    "SimKGC Freebase": (
        {
            "FB15k_mid2name.txt": ["01\tNew_York", "02\tBen", "03\tCleo"],
            "FB15k_mid2description.txt": [f"01\t{'word ' * 60}"],
        },
        [f"New York: {'word ' * 50}".strip(), "Ben", "Cleo"],
    ),
    "llmcond": (
        {"entities.tsv": ["01\tSpringfield, Ohio", "02\tSpringfield, Oregon", "03\ta, b"]},
        ["Springfield, Ohio", "Springfield, Oregon", "a, b"],
    ),
    "no table": ({}, ["01", "02", "03"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ENTITY_FILES)
def test_published_files_of_entities_are_read(tmp_path: Path, name: str):
    files, texts = ENTITY_FILES[name]
    graph = read_graph(write_files(tmp_path, {"entities.tsv": None, **files}))
    assert graph.entities.texts == texts


def test_invalid_input_reports_file_and_row(tmp_path: Path):
    for number, (files, message) in enumerate((
        ({"train.tsv": ["01\tlikes\t02", "01 likes 02", "01\tlikes"]},
         r"row 2 of train.tsv: 1 columns; expected head, relation and tail, .* \(1 more row"),
        ({"valid.tsv": None}, "has no dev or valid or validation file"),
        ({"dev.txt": ["01\tlikes\t02"]}, "several files of one split: dev.txt, valid.tsv"),
        ({"entities.tsv": ["01\tAda", "02\tBen", "01\tEve"]},
         "row 3 of entities.tsv: 01 occurs before, with another text"),
        ({"test.tsv": ["", "01\tlikes\t09", "08\tlikes\t09"]},
         r"entities that the table of entities lacks, 2 in all: '09', '08' \(triples: 2, the .* 2"),
    )):  # fmt: skip
        with pytest.raises(UserError, match=message):
            read_graph(write_files(tmp_path / str(number), files))
    with pytest.raises(UserError, match=r"does not exist. Expected a folder with train"):
        read_graph(tmp_path / "nowhere")


def test_notes_count_irregularities(tmp_path: Path):
    folder = write_files(
        tmp_path,
        {
            "train.tsv": [*TRAIN, "01\tlikes\t02"],
            "valid.tsv": ["02\tlikes\t01", "01\tlikes\t02"],
            "test.tsv": ["01\tlikes\t02", "02\towns\t01", "04\thates\t01"],
            "entities.tsv": ["01\tAda", "02\tAda", "03", "04\tDora", "05\tEve"],
            "relations.tsv": ["likes\tlikes", "owns\tlikes", "hates\thates"],
        },
    )

    assert read_graph(folder).notes == (
        "triples from train.tsv, valid.tsv, test.tsv; names of entities from entities.tsv; "
        "texts of relations from relations.tsv",
        "entities without a text, encoded by their ids: 1",
        "entities of the table in no triple, left out: 1",
        "duplicate train triples, counted once: 1",
        "entities that have the same text as another one: 2",
        "relations that have the same text as another one: 2",
        "dev triples in train too: 1 of 2",
        "dev triples whose reversed edge is in train: 1 of 2",
        "test triples in train too: 1 of 3",
        "test triples in dev too: 1 of 3",
        "test triples that another relation links in train: 1 of 3",
        "test triples of the 1 entities that train lacks: 1 of 3",
        "test triples of relations that train lacks ('hates'): 1 of 3",
    )


def test_saved_graph_is_loaded_unchanged(tmp_path: Path):
    graph = read_graph(write_files(tmp_path / "data"))
    graph.save(tmp_path)
    loaded = Graph.load(tmp_path)
    assert loaded.to_json() == graph.to_json()
    assert (loaded.entities, loaded.relations) == (graph.entities, graph.relations)
    for name, triples in graph.splits.items():
        assert loaded.splits[name].dtype == np.int32
        np.testing.assert_array_equal(loaded.splits[name], triples)
    other = write_files(tmp_path / "other", {"entities.tsv": ["01\tA", "02\tB", "03\tC"]})
    read_graph(other).save(other)
    (other / "entities.parquet").replace(tmp_path / "entities.parquet")
    with pytest.raises(UserError, match="have changed since they were written"):
        Graph.load(tmp_path)


# -- inputs of queries and candidates -----------------------------------------------------------

TEXTS = QueryTexts(
    sentences=["two dogs", "children"],
    conditions=["the place", "people", "inverse the place", "inverse people"],
    candidates=["two dogs", "children"],
    query_pairs=np.array([[0, 0], [0, 3], [1, 0]]),
    names=("entity", "relation", "entity"),
)


def get_texts(inputs):
    return [item.text for item in inputs]


def test_inputs_depend_on_prompt():
    separate = QueryInputs(TEXTS, load_prompt("separate"))
    assert list(separate.columns) == ["candidates", "sentences", "conditions"]
    assert get_texts(separate.sentences) == get_texts(separate.candidates) == TEXTS.candidates
    assert get_texts(separate.conditions) == TEXTS.conditions
    assert (len(separate), len(set(separate))) == (8, 6)

    inputs = QueryInputs(TEXTS, load_prompt("concat-sent-cond"))
    assert list(inputs.columns) == ["candidates", "joint", "conditions"]
    joint = ["two dogs the place", "two dogs inverse people", "children the place"]
    assert get_texts(inputs.joint) == joint  # queried pairs only
    assert inputs.locate(inputs.joint[1]) == (
        "the entity 'two dogs' under the relation 'inverse people'"
    )
    assert inputs.locate(inputs.conditions[1]) == "the relation 'people'"
    assert inputs.locate(EncoderInput("", "nothing")) is None

    shuffled = QueryInputs(TEXTS, load_prompt("control-shuffled"))
    assert get_texts(shuffled.joint)[1] == "two dogs the place"
    assert all(a != b for a, b in zip(get_texts(shuffled.joint), joint, strict=True))


# -- known tails --------------------------------------------------------------------------------


def test_known_tails_and_masks_match_set():
    triples = np.random.default_rng(0).integers(0, [30, 4, 30], size=(300, 3)).astype(np.int32)
    triple_set = {tuple(row) for row in triples.tolist()}
    known = KnownTriples(triples, 30)
    assert len(known._codes) == len(triple_set)
    head, relation = (grid.reshape(-1) for grid in np.mgrid[:30, :4])
    row, tail = known.gather(head, relation)
    pairs = list(zip(head[row].tolist(), relation[row].tolist(), tail.tolist(), strict=True))
    assert pairs == sorted(triple_set)
    all_triples = np.stack(np.mgrid[:30, :4, :30], axis=-1).reshape(-1, 3)
    expected = np.array([tuple(ids) in triple_set for ids in all_triples.tolist()])
    np.testing.assert_array_equal(known.contains(all_triples), expected)
    columns = np.array([7, 3, 3, 29])
    mask = known.mask(head, relation, columns)
    np.testing.assert_array_equal(mask, expected.reshape(-1, 30)[:, columns])
    # Queries of an unknown relation have no tails.
    assert known.gather(np.array([2]), np.array([5]))[1].size == 0
    assert not known.mask(np.array([2]), np.array([5]), columns).any()


# -- hops, reversed edges and subsets ------------------------------------------------------------


def find_within(graph: Graph, head: int, hops: int) -> set[int]:
    reached = {head}
    for _ in range(hops):
        links = [(h, t) for h, _, t in graph.splits["train"].tolist()]
        reached |= {b for h, t in links for a, b in ((h, t), (t, h)) if a in reached}
    return reached


@pytest.mark.parametrize("hops", [0, 1, 3])
def test_neighbourhood_matches_walk(hops):
    graph = random_graph(sizes=(18, 5, 5))
    heads = np.array([4, 0, 4, 29])
    row, entity = TrainGraph(graph).find_neighbourhood(heads, hops)
    for position, head in enumerate(heads.tolist()):
        assert set(entity[row == position].tolist()) == find_within(graph, head, hops)
    assert len(np.unique(np.stack([row, entity]), axis=1).T) == len(row)


def test_reverse_weights_are_fitted_by_relation():
    """The first of three relations is symmetric, and the second never goes both ways."""
    rng = np.random.default_rng(0)
    n = 80
    first, second, third = (rng.permutation(n * n)[:60] for _ in range(3))
    ends = [np.stack([numbers // n, numbers % n], axis=1) for numbers in (first, second, third)]

    def insert_relation(kind, pairs):
        return np.insert(pairs, 1, kind, axis=1).astype(np.int32)

    train = np.concatenate([insert_relation(kind, entities) for kind, entities in enumerate(ends)])
    # For the second relation, tails of edges in train have edges to other entities in dev.
    moved = np.stack([ends[1][:, 1], rng.integers(0, n, 60)], axis=1)
    dev = np.concatenate([insert_relation(0, ends[0][:, ::-1]), insert_relation(1, moved)])
    known = KnownTriples(both_directions(np.concatenate([train, dev]), 3), n)
    graph = replace(random_graph(n, 3), splits={"train": train})
    context, queries = TrainGraph(graph), both_directions(dev, 3)
    # The reversed edge already scores well, so that it has to be pushed down for the second.
    candidates = rng.standard_normal((n, 8)).astype(np.float32)
    query_vectors = rng.standard_normal((len(queries), 8)).astype(np.float32)
    row, entity = context.reversed_edges(queries[:, 0], queries[:, 1])
    np.add.at(query_vectors, row, 0.5 * candidates[entity])
    weights = fit_reverse_weights(query_vectors, candidates, queries, known, context)

    assert weights.shape == (6,)
    np.testing.assert_array_equal(weights[:3], weights[3:])
    assert weights[0] > 0 > weights[1]
    assert weights[2] == 0
    before = rank(query_vectors, candidates, queries, known)
    after = rank(query_vectors, candidates, queries, known, [context.create_reverse_term(weights)])
    assert (1 / after.resolve_ties()).mean() > (1 / before.resolve_ties()).mean() + 0.2


def test_subsets_cover_queries():
    graph = random_graph(sizes=(18, 5, 5))
    subsets = query_subsets(graph, "test")
    n = len(graph.queries("test"))
    train = set(graph.splits["train"][:, [0, 2]].reshape(-1).tolist())
    unseen = [h not in train or t not in train for h, _, t in graph.queries("test").tolist()]
    assert any(unseen)
    assert subsets["unseen"].tolist() == unseen
    assert subsets["forward"].tolist() == [True] * (n // 2) + [False] * (n // 2)
    assert (subsets["reversible"] ^ subsets["rest"]).all()
    by_category, by_relation = relation_subsets(graph, "test")
    assert set(by_category) == set(relation_categories(graph))
    assert list(by_relation) == graph.relations.ids
    for masks in (by_category, by_relation):
        assert sum(mask.sum() for mask in masks.values()) == n


def test_categories_depend_on_answers_of_each_side():
    train = [
        *((i, 0, i + 10) for i in range(4)),
        *((0, 1, i) for i in range(4)),
        *((i, 2, 0) for i in range(4)),
        *((i, 3, j) for i in range(3) for j in range(3)),
    ]
    splits = {"train": np.array(train, dtype=np.int32)}
    assert relation_categories(replace(random_graph(20, 4), splits=splits)) == [
        "1-1",
        "1-N",
        "N-1",
        "N-N",
    ]
