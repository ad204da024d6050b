"""mteb itself runs the wrapper on the task, and finds what evaluate finds."""

import pytest
from scipy.stats import spearmanr

import llmcond
from llmcond.data.datasets import read_rows, sample_folder


@pytest.fixture(scope="module")
def wrapper():
    """The module that is tested. It imports mteb, which takes seconds: not while collecting."""
    from llmcond.integrations import mteb

    return mteb


def evaluated(model, task):
    import mteb

    found = mteb.evaluate(
        model, task, cache=None, co2_tracker=False, show_progress_bar=False,
        encode_kwargs={"batch_size": 256},
    )  # fmt: skip
    [scores] = found.task_results[0].scores.values()
    return scores[0]["main_score"]


def test_the_bundled_sample(wrapper, tiny_run):
    rows, _ = read_rows(sample_folder(), "test")
    embedder = llmcond.load_embedder(tiny_run, "none")
    wanted = spearmanr(
        embedder.similarity(rows.sentence1, rows.sentence2, rows.condition), rows.rating
    ).statistic
    assert evaluated(wrapper.MtebEncoder(tiny_run, head="none"), wrapper.CSTS()) == pytest.approx(
        wanted, abs=1e-4
    )


def test_rows_of_ones_own(wrapper, tiny_run, write_rows, small_rows):
    source = write_rows([*small_rows, ("a", "b", "c", -1)])
    rows, _ = read_rows(source)
    rows = rows.take(rows.rated)
    texts = (rows.sentence1, rows.sentence2)
    plain = llmcond.load_embedder(tiny_run, "none").similarity(*texts, "the place")
    # A task without conditions is done under the one that was given.
    task = wrapper.CSTS(source)
    task.column_names = ("sentence1", "sentence2")
    found = evaluated(wrapper.MtebEncoder(tiny_run, head="none", condition="the place"), task)
    assert found == pytest.approx(spearmanr(plain, rows.rating).statistic, abs=1e-4)


def test_a_task_without_conditions_is_refused(wrapper, tiny_run, write_rows, small_rows):
    task = wrapper.CSTS(write_rows(small_rows))
    task.column_names = ("sentence1", "sentence2")
    with pytest.raises(llmcond.UserError, match="has no conditions"):
        evaluated(wrapper.MtebEncoder(tiny_run, head="none"), task)


def test_results_are_kept_apart(wrapper, tiny_run, write_rows, small_rows):
    first, second = (wrapper.MtebEncoder(tiny_run, head="none", device="cpu") for _ in range(2))
    assert first.mteb_model_meta.revision == second.mteb_model_meta.revision
    tasks = [wrapper.CSTS(write_rows(rows)) for rows in (small_rows, small_rows[1:])]
    assert len({task.metadata.dataset["revision"] for task in tasks}) == 2
