"""BERTopic finds topics with the backend, and compares words and topics with documents."""

import csv
import pickle
import re

import numpy as np
import pytest
from helpers.paths import ROOT, python_blocks
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.metrics import v_measure_score

import llmcond

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("one_thread")]

with (ROOT / "docs" / "tickets.csv").open(encoding="utf-8") as file:
    TICKETS = list(csv.DictReader(file))[::5]
TEXTS = [ticket["text"] for ticket in TICKETS]
PRODUCTS = [ticket["product"] for ticket in TICKETS]


@pytest.fixture(scope="module")
def backend_class():
    """The tested class, imported late because it imports BERTopic, which takes seconds."""
    from llmcond.integrations.bertopic import ConditionalBackend

    return ConditionalBackend


@pytest.fixture(scope="module")
def embedder():
    return llmcond.load_embedder("minilm-conditions")


def make_topic_model(backend, **options):
    """A model whose reduction and clustering need no compilation."""
    from bertopic import BERTopic

    return BERTopic(
        embedding_model=backend,
        umap_model=PCA(5, random_state=0),
        hdbscan_model=KMeans(5, n_init=10, random_state=0),
        vectorizer_model=CountVectorizer(stop_words="english"),
        **options,
    )


def test_topics_and_words_follow_condition(backend_class, embedder, tmp_path):
    from bertopic import BERTopic
    from bertopic.representation import KeyBERTInspired

    backend = backend_class("the product")
    model = make_topic_model(backend, representation_model=KeyBERTInspired(top_n_words=4))
    topics, _ = model.fit_transform(TEXTS)
    assert v_measure_score(PRODUCTS, topics) > 0.95
    vectors = embedder.encode([*TEXTS, "kettle"], "the product")
    np.testing.assert_array_equal(backend.embed_documents(TEXTS), vectors[:-1])
    np.testing.assert_array_equal(backend.embed_words(["kettle"]), vectors[-1:])
    [kettles] = {topic for topic, name in zip(topics, PRODUCTS, strict=True) if name == "kettle"}
    assert "kettle" in [word for word, _ in model.get_topic(kettles)]
    assert model.find_topics("kettle", top_n=1)[0] == [kettles]
    # BERTopic does not store the backend.
    model.save(tmp_path / "topics", serialization="safetensors", save_embedding_model=False)
    loaded = BERTopic.load(tmp_path / "topics", embedding_model=backend_class("the product"))
    assert loaded.transform(TEXTS[:9])[0].tolist() == topics[:9]


def test_zero_shot_topics_are_embedded_as_documents(backend_class):
    names = ["blender", "headphones", "kettle", "printer", "tent"]
    model = make_topic_model(
        backend_class("the product"), zeroshot_topic_list=names, zeroshot_min_similarity=0.0
    )
    topics, _ = model.fit_transform(TEXTS)
    # No document is left for clustering.
    assert v_measure_score(PRODUCTS, topics) > 0.95
    labels = [model.topic_labels_[topic] for topic in topics]
    assert all(name in label for name, label in zip(PRODUCTS, labels, strict=True))


def test_first_documents_show_what_to_ignore(backend_class, embedder):
    condition = llmcond.Condition("the problem | the complaint", ignore="the product")
    backend = backend_class("the problem | the complaint", ignore="the product")
    with pytest.raises(llmcond.UserError, match="embed at least 50 documents first"):
        backend.embed_words(["late"])
    with pytest.raises(llmcond.UserError, match="49 distinct texts, and at least 50"):
        backend.embed_documents(TEXTS[:49])
    vectors = backend.embed_documents(TEXTS)
    ignoring = embedder.ignoring(TEXTS, condition)
    np.testing.assert_array_equal(vectors, ignoring.encode(TEXTS, condition))
    copy = pickle.loads(pickle.dumps(backend))
    few = ["late", TEXTS[0]]
    np.testing.assert_array_equal(copy.embed_documents(few), ignoring.encode(few, condition))
    np.testing.assert_array_equal(
        backend_class(condition).embed_documents(TEXTS), ignoring.encode(TEXTS, condition)
    )


def test_empty_words_are_zeros_and_empty_conditions_errors(backend_class):
    backend = backend_class("the product", truncate_dim=64)
    vectors = backend.embed(["", "a kettle", " "])
    assert vectors.shape == (3, 64)
    assert np.linalg.norm(vectors, axis=1).tolist() == pytest.approx([0, 1, 0])
    assert backend.embed([]).shape == (0, 64)
    for condition in ("", None):
        with pytest.raises(llmcond.UserError, match="the condition is empty"):
            backend_class(condition)


@pytest.mark.slow
def test_tutorial_has_the_recorded_figures(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "bertopic.md").read_text(encoding="utf-8")
    namespace = {}
    for block in python_blocks(page):
        if "altair" not in block:
            exec(block, namespace)  # text of the page
    figures = [
        [int(figure) for figure in re.findall(r"^V-measure (\d+)$", text, re.MULTILINE)]
        for text in (page, capsys.readouterr().out)
    ]
    assert len(figures[0]) == 6
    assert figures[1] == pytest.approx(figures[0], abs=5)
