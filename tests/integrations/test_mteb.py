"""mteb runs the wrapper on the task, and gets the scores that llmcond computes."""

import pytest
from scipy.stats import spearmanr

import llmcond
from llmcond.data.datasets import read_rows, sample_folder


@pytest.fixture(scope="module")
def wrapper():
    """The tested module, imported late because it imports mteb, which takes seconds."""
    from llmcond.integrations import mteb

    return mteb


def evaluate_with_mteb(model, task):
    import mteb

    results = mteb.evaluate(
        model, task, cache=None, co2_tracker=False, show_progress_bar=False,
        encode_kwargs={"batch_size": 256},
    )  # fmt: skip
    [scores] = results.task_results[0].scores.values()
    return scores[0]["main_score"]


def test_score_of_bundled_sample_matches_embedder(wrapper, tiny_run):
    rows, _ = read_rows(sample_folder(), "test")
    embedder = llmcond.load_embedder(tiny_run, "none")
    expected = spearmanr(
        embedder.similarity(rows.sentence1, rows.sentence2, rows.condition), rows.rating
    ).statistic
    assert evaluate_with_mteb(
        wrapper.MtebEncoder(tiny_run, head="none"), wrapper.CSTS()
    ) == pytest.approx(expected, abs=1e-4)


def test_task_without_conditions_uses_condition_of_encoder(
    wrapper, tiny_run, write_rows, small_rows
):
    source = write_rows([*small_rows, ("a", "b", "c", -1)])
    rows, _ = read_rows(source)
    rows = rows.take(rows.rated)
    texts = (rows.sentence1, rows.sentence2)
    similarities = llmcond.load_embedder(tiny_run, "none").similarity(*texts, "the place")
    # A task without conditions uses the condition of the encoder.
    task = wrapper.CSTS(source)
    task.column_names = ("sentence1", "sentence2")
    score = evaluate_with_mteb(
        wrapper.MtebEncoder(tiny_run, head="none", condition="the place"), task
    )
    assert score == pytest.approx(spearmanr(similarities, rows.rating).statistic, abs=1e-4)


def test_task_without_any_condition_is_rejected(wrapper, tiny_run, write_rows, small_rows):
    task = wrapper.CSTS(write_rows(small_rows))
    task.column_names = ("sentence1", "sentence2")
    with pytest.raises(llmcond.UserError, match="has no conditions"):
        evaluate_with_mteb(wrapper.MtebEncoder(tiny_run, head="none"), task)


def test_revisions_identify_model_and_data(wrapper, tiny_run, write_rows, small_rows):
    first, second = (wrapper.MtebEncoder(tiny_run, head="none", device="cpu") for _ in range(2))
    assert first.mteb_model_meta.revision == second.mteb_model_meta.revision
    tasks = [wrapper.CSTS(write_rows(rows)) for rows in (small_rows, small_rows[1:])]
    assert len({task.metadata.dataset["revision"] for task in tasks}) == 2
