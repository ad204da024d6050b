"""The blocks of docs/vector-databases.md run, and give the vectors and rankings of llmcond."""

import doctest
import subprocess
import sys
from pkgutil import resolve_name

import numpy as np
import pytest
from helpers.paths import ROOT, python_blocks

import llmcond

pytestmark = pytest.mark.programs

PAGE = (ROOT / "docs" / "vector-databases.md").read_text(encoding="utf-8")
CONDITIONS = {"problem": "the problem", "product": "the product"}
WEIGHTS = {"the problem": 1.0, "the product": -0.5}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The variables after the blocks of each section of the page, by its title, and its folder."""
    sections, variables = {"folder": tmp_path_factory.mktemp("page")}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(sections["folder"])
        for section in PAGE.split("\n## "):
            for block in python_blocks(section):
                exec(block, variables)  # text of the page
            sections[section.partition("\n")[0]] = dict(variables)
        yield sections
        variables["client"].close()
        variables["connection"].close()
        variables["server"].stop()


@pytest.fixture(scope="module")
def embedder():
    return llmcond.load_embedder("minilm-conditions")


@pytest.fixture(scope="module")
def expected(page, tmp_path_factory):
    """The two nearest texts of llmcond's index, by section and variable of the page."""
    texts, query = page["pgvector"]["texts"], page["pgvector"]["query"]
    index = llmcond.Index.build(tmp_path_factory.mktemp("index"), texts)
    names = {"late": "the problem", "lamps": "the product", "other_products": WEIGHTS}
    return {
        variable: [(hit["text"], hit["score"]) for hit in index.search(query, condition, k=2).rows]
        for variable, condition in names.items()
    }


def run_python(code, folder):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)


def test_rankings_are_those_of_an_index(page, expected):
    late, lamps, others = ([text for text, _ in hits] for hits in expected.values())
    assert len({*map(tuple, (late, lamps, others))}) == 3
    assert page["Chroma"]["late"] == late
    assert [row["text"] for row in page["LanceDB"]["late"]] == late
    assert [row["text"] for row in page["LanceDB"]["lamps"]] == lamps
    assert [point.payload["text"] for point in page["Qdrant"]["late"]] == late
    assert [point.payload["text"] for point in page["Qdrant"]["other_products"]] == others
    assert [text for (text,) in page["pgvector"]["late"]] == late
    assert [text for text, _ in page["pgvector"]["other_products"]] == others
    assert page["Weights in any database"]["other_products"] == others
    assert [point.payload["text"] for point in page["Smaller vectors"]["late"]] == late
    scores = [score for _, score in expected["other_products"]]
    qdrant = [point.score for point in page["Qdrant"]["other_products"]]
    assert qdrant == pytest.approx(scores, abs=5e-4)  # an index has float16
    postgres = [score for _, score in page["pgvector"]["other_products"]]
    assert postgres == pytest.approx(scores, abs=5e-4)


def test_vectors_are_those_of_the_embedder(page, embedder):
    texts = page["pgvector"]["texts"]
    problem, product = (embedder.encode(texts, condition) for condition in WEIGHTS)
    stored = page["Chroma"]["problems"].get(include=["embeddings", "documents"])
    # Chroma and Qdrant normalise them again.
    np.testing.assert_allclose(stored["embeddings"], problem, atol=1e-7)
    rows = page["LanceDB"]["table"].to_arrow().to_pydict()
    np.testing.assert_array_equal(rows["problem"], problem.astype(np.float16))
    np.testing.assert_array_equal(rows["product"], product.astype(np.float16))
    rows = page["pgvector"]["connection"].execute("SELECT problem FROM tickets ORDER BY id")
    np.testing.assert_array_equal([row[0].to_numpy() for row in rows.fetchall()], problem)
    points, _ = page["Qdrant"]["client"].scroll("tickets", with_vectors=True)
    vectors = {point.payload["text"]: point.vector["problem"] for point in points}
    np.testing.assert_allclose([vectors[text] for text in texts], problem, atol=1e-7)


def test_examples_of_docstrings_run(in_tmp):
    for name in ("chroma.ChromaEmbeddingFunction", "lancedb.LanceEmbeddingFunction"):
        value = resolve_name(f"llmcond.integrations.{name}")
        [test] = doctest.DocTestFinder(recurse=False).find(value, globs={})
        assert doctest.DocTestRunner().run(test).failed == 0


def test_reopening_in_another_process_needs_an_import(page, expected):
    query, (text, _) = page["pgvector"]["query"], expected["late"][0]
    chroma = "chromadb; print(chromadb.PersistentClient('tickets.chroma')"
    chroma += f".get_collection('problems').query(query_texts={query!r}, n_results=1)['documents'])"
    lance = "lancedb; print(lancedb.connect('tickets.lancedb').open_table('tickets')"
    lance += f".search({query!r}, vector_column_name='problem').limit(1).to_list())"
    for module, code, message in (
        ("chroma", chroma, "Embedding function llmcond not found"),
        ("lancedb", lance, "KeyError: 'llmcond'"),
    ):
        assert message in run_python(f"import {code}", page["folder"]).stderr
        run = run_python(f"import llmcond.integrations.{module}, {code}", page["folder"])
        assert text in run.stdout, run.stderr


def test_other_conditions_and_changed_models_are_errors(page, monkeypatch):
    import lancedb

    from llmcond.integrations.chroma import ChromaEmbeddingFunction
    from llmcond.integrations.conditioned import ConditionedModel
    from llmcond.integrations.lancedb import LanceEmbeddingFunction

    problems, other = page["Chroma"]["problems"], ChromaEmbeddingFunction("the product")
    with pytest.raises(llmcond.UserError, match=r"under 'the problem'.*'the product'"):
        problems.modify(configuration={"embedding_function": other})
    problems.modify(configuration={"embedding_function": ChromaEmbeddingFunction("the problem")})
    table = page["LanceDB"]["table"]
    with pytest.raises(ValueError, match="No embedding function for the_mood"):
        table.search("late", vector_column_name="the_mood", query_type="vector")
    for condition in ("", None):
        for create in (ChromaEmbeddingFunction, LanceEmbeddingFunction.create):
            with pytest.raises(llmcond.UserError, match="condition is empty"):
                create(condition)
    # An error at once: LanceDB would repeat failed requests for minutes.
    with pytest.raises(llmcond.UserError, match="is empty"):
        table.search("", vector_column_name="problem")
    fingerprint = property(lambda self: "of newer weights")
    monkeypatch.setattr(ConditionedModel, "fingerprint", fingerprint)
    message = "of another model than minilm-conditions is now"
    with pytest.raises(ValueError, match=message):
        page["Chroma"]["client"].get_collection("problems").query(query_texts=["late"])
    table = lancedb.connect(page["folder"] / "tickets.lancedb").open_table("tickets")
    with pytest.raises(llmcond.UserError, match=message):
        table.search("late", vector_column_name="problem")
    with pytest.raises(llmcond.UserError, match=message):
        page["pgvector"]["read_model"]("problem")
