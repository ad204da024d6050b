"""Knowledge graphs: published file formats, invalid input, known tails and the sample."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT

from llmcond.errors import UserError
from llmcond.kinds.ranking.graph import (
    Graph,
    KnownTriples,
    both_directions,
    read_graph,
    relation_text,
)

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


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("train.tsv", "head\trelation\ttail"),
        ("train.tsv", "Subject\tPredicate\tObject"),
        ("valid.tsv", "source\tedge type\ttarget"),
        ("test.tsv", "h\tr\tt"),
        ("entities.tsv", "id\tname\tdescription"),
        ("entities.tsv", "entity\ttext"),
        ("relations.tsv", "relation\ttext\tinverse"),
    ],
)
@pytest.mark.parametrize("has_tables", [True, False])
def test_header_is_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, header: str, has_tables: bool
):
    tables = {} if has_tables else {"entities.tsv": None, "relations.tsv": None}
    expected = read_graph(write_files(tmp_path, tables))
    if name in tables:
        return
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf\n" + f"{header}\n".encode() + content)
    with caplog.at_level("INFO", "llmcond"):
        graph = read_graph(tmp_path)
    assert graph.digest == expected.digest
    shown = ", ".join(header.split("\t"))
    message = f"{tmp_path / name}: the first line is a header, and left out: {shown}"
    assert caplog.messages == [message]


def test_header_with_other_words_is_suspected(tmp_path: Path):
    lines = ["Kopf\tBeziehung\tZiel", *TRAIN]
    with pytest.raises(
        UserError, match=r"first in row 1\). Add them to the table, remove a header"
    ):
        read_graph(write_files(tmp_path, {"train.tsv": lines}))
    tables = {"entities.tsv": None, "relations.tsv": None}
    graph = read_graph(write_files(tmp_path / "plain", {"train.tsv": lines, **tables}))
    assert any("Kopf, Beziehung, Ziel; if it is a header" in note for note in graph.notes)
    assert not any("header" in note for note in read_graph(write_files(tmp_path / "other")).notes)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("01\tlikes\t02\n".encode("utf-16-le"), "train.tsv seems to be UTF-16.*iconv -f UTF-16-LE"),
        (b"01\tcaf\xe9\t02\n", "0xe9 in line 1.*Windows-1252: convert it: iconv -f WINDOWS-1252"),
        (b"\x1f\x8b\x08\0", "train.tsv is not text: it is compressed with gzip"),
    ],
)
def test_file_of_another_encoding_is_described(tmp_path: Path, content: bytes, words: str):
    (write_files(tmp_path) / "train.tsv").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_graph(tmp_path)


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


def test_saved_graph_is_loaded_unchanged(tmp_path: Path):
    graph = read_graph(write_files(tmp_path / "data"))
    graph.save(tmp_path)
    loaded = Graph.load(tmp_path)

    assert loaded.digest == graph.digest
    assert loaded.to_json() == graph.to_json()
    assert (loaded.entities, loaded.relations) == (graph.entities, graph.relations)
    for name, triples in graph.splits.items():
        assert loaded.splits[name].dtype == np.int32
        np.testing.assert_array_equal(loaded.splits[name], triples)


def test_mixed_files_of_two_graphs_are_rejected(tmp_path: Path):
    read_graph(write_files(tmp_path / "one")).save(tmp_path / "one")
    read_graph(write_files(tmp_path / "two", {"entities.tsv": ["01\tA", "02\tB", "03\tC"]})).save(
        tmp_path
    )
    (tmp_path / "one" / "entities.parquet").replace(tmp_path / "entities.parquet")

    with pytest.raises(UserError, match="have changed since they were written"):
        Graph.load(tmp_path)


def test_missing_file_of_saved_graph_is_reported(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be read"):
        Graph.load(tmp_path)


def test_kg_bert_files_are_read(tmp_path: Path):
    lines = ['01\tstool, waste "matter, solid', "02\tsaxony, an area in Germany", "03\ta, b, c"]
    relations = ["likes\tis fond of", "owns\towns"]
    folder = write_files(
        tmp_path,
        {
            "entities.tsv": None,
            "relations.tsv": None,
            "entity2text.txt": lines,
            "relation2text.txt": relations,
        },
    )
    graph = read_graph(folder)

    assert graph.entities.names == ["stool", "saxony", "a"]
    assert graph.entities.texts[0] == 'stool: waste "matter, solid'
    assert graph.entities.texts[2] == "a: b, c"
    assert graph.relations.inverse == ["inverse is fond of", "inverse owns"]


def test_names_with_occasional_commas_are_not_split(tmp_path: Path):
    lines = ["01\tWashington, D.C.", "02\tBerlin", "03\tRome"]
    graph = read_graph(write_files(tmp_path, {"entities.tsv": None, "entity2text.txt": lines}))

    assert graph.entities.names == ["Washington, D.C.", "Berlin", "Rome"]


def test_simkgc_wordnet_names_lose_sense_suffix(tmp_path: Path):
    lines = ["01\t__family_alcidae_NN_1\tauks", "02\t__stool_NN_2\twaste", "03\t__run_VB_1\tmove"]
    graph = read_graph(
        write_files(tmp_path, {"entities.tsv": None, "wordnet-mlj12-definitions.txt": lines})
    )

    assert graph.entities.texts == ["family alcidae: auks", "stool: waste", "run: move"]


def test_simkgc_freebase_descriptions_are_cut_after_fifty_words(tmp_path: Path):
    graph = read_graph(
        write_files(
            tmp_path,
            {
                "entities.tsv": None,
                "FB15k_mid2name.txt": ["01\tNew_York", "02\tBen", "03\tCleo"],
                "FB15k_mid2description.txt": [f"01\t{'word ' * 60}"],
            },
        )
    )

    assert graph.entities.texts == [f"New York: {'word ' * 50}".strip(), "Ben", "Cleo"]
    assert "entities without a description, encoded by their names: 2" in graph.notes


def test_names_and_descriptions_are_merged_from_several_tables(tmp_path: Path):
    """The files are FB15k-237 from StAR, another table of names, and the id lists of KG-BERT."""
    folder = write_files(
        tmp_path,
        {
            "entities.tsv": None,
            "relations.tsv": None,
            "entities.txt": ["01", "02", "03"],
            "relations.txt": ["likes", "owns"],
            "relation2text.txt": ["likes\tis fond of", "owns\tis the owner of"],
            "fb-entity2text-new.txt": [
                *(f"0{number}\tnumber {number} -- the number {number}" for number in range(4, 50)),
                "01\tAda Lane -- a cook",
                "02\tBen Ash -- Ben Ash is a farmer",
            ],
            "FB15k_mid2name.txt": ["01\tAda", "02\tBen", "03\tCleo_West"],
            "README.md": ["About this data."],
        },
    )
    graph = read_graph(folder)

    assert graph.entities.texts == ["Ada Lane: a cook", "Ben Ash: is a farmer", "Cleo West"]
    assert graph.relations.texts == ["is fond of", "is the owner of"]
    assert graph.notes[:2] == (
        "triples from train.tsv, valid.tsv, test.tsv; names and descriptions of entities from "
        "fb-entity2text-new.txt; names of entities from FB15k_mid2name.txt; texts of relations "
        "from relation2text.txt; not used: 'README.md', 'entities.txt', 'relations.txt'",
        "entities without a description, encoded by their names: 1",
    )


def test_kg_bert_long_descriptions_follow_names(tmp_path: Path):
    files = {
        "entities.tsv": None,
        "entity2text.txt": ["01\tAda", "02\tBen"],
        "entity2textlong.txt": ["01\tAda is a cook", "02\ta farmer", "03\tsomebody"],
    }
    graph = read_graph(write_files(tmp_path, files))

    assert graph.entities.names == ["Ada", "Ben", "03"]
    assert graph.entities.texts == ["Ada: is a cook", "Ben: a farmer", "somebody"]


def test_ids_are_texts_if_tables_are_missing(tmp_path: Path):
    graph = read_graph(write_files(tmp_path, {"entities.tsv": None, "relations.tsv": None}))

    assert graph.entities.texts == ["01", "02", "03"]
    assert graph.relations.texts == ["likes", "owns"]
    assert "no table of entities: their ids are encoded instead of texts" in graph.notes


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("_derivationally_related_form", "derivationally related form"),
        ("/people/person/spouse_s./people/marriage/type_of_union",
         "type of union marriage spouse s person people"),
    ],
)  # fmt: skip
def test_relation_text_is_derived_from_id(key: str, text: str):
    assert relation_text(key) == text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.tsv": ["01\tlikes\t02", "01 likes 02", "01\tlikes"]},
         r"row 2 of train.tsv: 1 columns; expected head, relation and tail, separated by tabs "
         r"\(1 more row"),
        ({"train.tsv": ["01\t\t02"]}, "row 1 of train.tsv: an id is empty"),
        ({"test.tsv": []}, "test.tsv is empty: it has no triples"),
        ({"entities.tsv": []}, "entities.tsv is empty: it has no rows"),
        ({"valid.tsv": None}, "has no dev or valid or validation file"),
        ({"dev.txt": ["01\tlikes\t02"]}, "several files of one split: dev.txt, valid.tsv"),
        ({"entities.tsv": ["01\tAda", "02\tBen", "01\tEve"]},
         "row 3 of entities.tsv: 01 occurs before, with another text"),
        ({"entities.tsv": ["01\ta\tb\tc"]}, "row 1 of entities.tsv: 4 columns; expected 3"),
        ({"test.tsv": ["", "01\tlikes\t09", "08\tlikes\t09"]},
         r"test.tsv has entities that the table of entities lacks, 2 in all: '09', '08' "
         r"\(triples: 2, the first in row 2\)"),
        (
            {"test.tsv": ["01\thates\t02"]},
            "test.tsv has relations that the table of relations lacks, 1 in all: 'hates'",
        ),
    ],
)  # fmt: skip
def test_invalid_input_reports_file_and_row(tmp_path: Path, files, message: str):
    with pytest.raises(UserError, match=message):
        read_graph(write_files(tmp_path, files))


def test_non_utf8_file_is_rejected(tmp_path: Path):
    (write_files(tmp_path) / "entities.tsv").write_bytes(b"01\tAd\xe4\n")
    with pytest.raises(UserError, match=r"entities.tsv is not UTF-8: byte 0xe4"):
        read_graph(tmp_path)


def test_missing_folder_and_file_are_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"does not exist. Expected a folder with train"):
        read_graph(tmp_path / "nowhere")
    (tmp_path / "file.tsv").touch()
    with pytest.raises(UserError, match="is a file"):
        read_graph(tmp_path / "file.tsv")


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


# -- known tails -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_triples() -> tuple[np.ndarray, set[tuple[int, ...]]]:
    triples = np.random.default_rng(0).integers(0, [30, 4, 30], size=(300, 3)).astype(np.int32)
    return triples, {tuple(row) for row in triples.tolist()}


def test_known_tails_match_set(random_triples):
    triples, triple_set = random_triples
    known = KnownTriples(triples, 30)
    head, relation = (grid.reshape(-1) for grid in np.mgrid[:30, :4])
    row, tail = known.gather(head, relation)

    assert len(known) == len(triple_set)
    pairs = list(zip(head[row].tolist(), relation[row].tolist(), tail.tolist(), strict=True))
    assert pairs == sorted(triple_set)
    all_triples = np.stack(np.mgrid[:30, :4, :30], axis=-1).reshape(-1, 3)
    expected = [tuple(row_ids) in triple_set for row_ids in all_triples.tolist()]
    np.testing.assert_array_equal(known.contains(all_triples), expected)


def test_masks_match_loops(random_triples):
    triples, triple_set = random_triples
    known = KnownTriples(triples, 30)
    rng = np.random.default_rng(1)
    for _ in range(20):
        head, relation, columns = rng.integers(0, [[30], [4], [30]], size=(3, 25))
        expected = [
            [(h, r, t) in triple_set for t in columns.tolist()]
            for h, r in zip(head.tolist(), relation.tolist(), strict=True)
        ]
        np.testing.assert_array_equal(known.mask(head, relation, columns), expected)


def test_query_without_known_triples_has_no_tails():
    known = KnownTriples(np.array([[0, 0, 1]]), 3)
    row, tail = known.gather(np.array([2, 0]), np.array([5, 0]))

    assert (row.tolist(), tail.tolist()) == ([1], [1])
    assert not known.mask(np.array([2]), np.array([0]), np.array([0, 1, 1])).any()


def test_known_triples_cover_all_splits_in_both_directions(tmp_path: Path):
    graph = read_graph(write_files(tmp_path))
    known = KnownTriples(graph)

    for triples in graph.splits.values():
        assert known.contains(both_directions(triples, 2)).all()
    assert len(known) == 10


# -- the sample --------------------------------------------------------------------------------


def test_sample_matches_output_of_script(tmp_path: Path):
    command = [sys.executable, ROOT / "scripts" / "make_sample_graph.py", "--check"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    process = subprocess.run(
        [*command, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1
    assert "train.tsv: missing, or differs from what this script writes" in process.stdout


def test_sample_answers_depend_on_relation():
    graph = read_graph()
    queries = graph.queries("test")
    known = KnownTriples(graph)
    n_correct = n_correct_things = n_things = 0
    for entity in np.unique(queries[:, 0]):
        rows = queries[queries[:, 0] == entity]
        relations, count = np.unique(rows[:, 1], return_counts=True)
        # Tails of different relations differ. A model that ignores the relation ranks the tails of
        # one relation before those of the others, and is correct for that relation at best.
        tails = [set(known.gather(rows[:1, 0], relation[None])[1]) for relation in relations]
        assert len(set.union(*tails)) == sum(map(len, tails))
        n_correct += count.max()
        if len(relations) == 9:
            n_correct_things, n_things = n_correct_things + count.max(), n_things + len(rows)
    assert n_things == len(queries) / 2
    assert n_correct_things / n_things == 0.2
    assert n_correct / len(queries) < 0.45
