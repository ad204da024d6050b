"""The size and the precision of embeddings over HTTP."""

import base64
import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers.serving import serve

import llmcond
from llmcond.base.errors import UserError
from llmcond.search import Index
from llmcond.serving.model import ServedModel
from llmcond.serving.model_server import load_model
from llmcond.serving.settings import ServedSource

REQUEST = {"input": ["two men play", "children sit", "dogs"], "condition": "the place"}
TEXTS, CONDITION = REQUEST["input"], REQUEST["condition"]


@pytest.fixture(scope="module")
def matryoshka_run(tiny_run, tmp_path_factory):
    """A run with a head that was trained for shorter embeddings, and with PCA."""
    folder = shutil.copytree(tiny_run, tmp_path_factory.mktemp("served") / "run")
    settings = {"epochs": "1", "matryoshka": "8,4"}
    llmcond.fit_head(run=folder, head="linear", dim=16, set=settings, name="linear")
    llmcond.fit_head(run=folder, head="pca", dim=16, name="pca")
    return folder


def test_dimensions_and_precisions_of_requests(matryoshka_run, tmp_path):
    ranges = np.stack([np.full(16, -0.5), np.full(16, 0.5)])
    np.save(tmp_path / "ranges.npy", ranges)
    source = ServedSource(run=matryoshka_run, head="linear", device="cpu")
    model = load_model(replace(source, ranges=tmp_path / "ranges.npy"))
    embedder = model.model
    with serve(model) as (client, _):

        def embed(**fields):
            response = client.post("/v1/embeddings", {**REQUEST, **fields})
            assert response.status == 200, response.body
            return [entry["embedding"] for entry in response.json["data"]]

        for dimensions in (4, 8):
            encoded = embed(dimensions=dimensions, encoding_format="base64")
            decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in encoded]
            expected = embedder.encode(TEXTS, CONDITION, truncate_dim=dimensions)
            np.testing.assert_allclose(decoded, expected, atol=1e-6)
        for precision in ("int8", "uint8", "binary", "ubinary"):
            codes = embed(precision=precision, encoding_format="base64")
            vectors = embedder.encode(TEXTS, CONDITION)
            expected = llmcond.quantize_embeddings(vectors, precision, ranges)
            assert np.abs(np.array(codes) - expected.astype(int)).max() <= 1
            assert all(isinstance(value, int) for value in codes[0])
        for fields, param, message in (
            ({"dimensions": 5}, "dimensions", "the other sizes that it supports are: 8, 4."),
            (
                {"dimensions": 4, "precision": "int8"},
                *("precision", "the server has no ranges of 4 dimensions"),
            ),
        ):
            error = client.post("/v1/embeddings", {**REQUEST, **fields}).error
            assert error["param"] == param
            assert message in error["message"]


def test_sizes_depend_on_head_and_guides(matryoshka_run, embedder):
    pca = ServedModel(llmcond.load_embedder(matryoshka_run, "pca"))
    assert pca.find_form_problem(3, "float32") is None
    assert "are: 1 to 15." in pca.find_form_problem(17, "float32")[1]
    guided = replace(pca, model=pca.model.guided(["a", "b"], ["x", "y"], "c"))
    assert "its guides map all of them" in guided.find_form_problem(3, "float32")[1]
    assert ServedModel(embedder).find_form_problem(None, "uint8")[0] == "precision"
    untrained = ServedModel(embedder).find_form_problem(3, "float32")
    assert untrained[0] == "dimensions"
    assert "start the server with --truncate-dim" in untrained[1]


def test_server_can_truncate_any_embeddings_but_not_those_of_an_index(tiny_run, tmp_path):
    source = ServedSource(run=tiny_run, head="none", device="cpu", truncate_dim=5)
    model = load_model(source)
    vectors = model.encode([("a", "b")]).vectors
    assert model.form_embeddings(vectors, None, "float32").shape == (1, 5)
    with pytest.raises(UserError, match="truncate_dim is 500"):
        load_model(replace(source, truncate_dim=500))
    index = Index.build(tmp_path / "i", run=tiny_run, head="none", device="cpu", truncate_dim=5)
    source = ServedSource(index=index.folder, device="cpu")
    assert load_model(source).model.dim == 5
    with pytest.raises(UserError, match=r"--truncate-dim is 6, but .* was built with 5"):
        load_model(replace(source, truncate_dim=6))
