"""The feature store: what is put in comes out, once, and never mixed with another's."""

import json
from dataclasses import replace

import lance
import numpy as np
import pytest
from identities import IDENTITY

from llmcond.encoders import EncoderInput
from llmcond.errors import LlmcondError, UserError
from llmcond.features.store import FeatureStore

INPUTS = [EncoderInput("", f"text {i}") for i in range(20)]
VECTORS = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)


def append(store, chosen=range(20), vectors=VECTORS):
    chosen = list(chosen)
    return store.append(
        [INPUTS[i] for i in chosen],
        vectors[chosen],
        np.arange(20, dtype=np.int32)[chosen],
        (np.arange(20) % 3 == 0)[chosen],
    )


@pytest.fixture
def store(tmp_path):
    return FeatureStore(tmp_path, IDENTITY, "float32")


def test_float32_vectors_come_back_bit_for_bit(store):
    append(store)
    np.testing.assert_array_equal(store.read(INPUTS), VECTORS)


def test_float16_vectors_come_back_as_float16_rounds_them(tmp_path):
    store = FeatureStore(tmp_path, IDENTITY, "float16")
    append(store)
    read = store.read(INPUTS)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, VECTORS.astype(np.float16).astype(np.float32))
    assert np.abs(read - VECTORS).max() > 0


def test_vectors_are_read_in_the_order_asked_for(store):
    append(store, [7, 3, 11])
    append(store, [0, 19])
    wanted = [19, 3, 0, 7, 3, 11, 19]
    np.testing.assert_array_equal(store.read([INPUTS[i] for i in wanted]), VECTORS[wanted])


def test_reading_in_blocks_changes_nothing(store, monkeypatch):
    monkeypatch.setattr("llmcond.features.store._READ_ROWS", 3)
    append(store)
    np.testing.assert_array_equal(store.read(INPUTS[::-1]), VECTORS[::-1])


def test_an_input_appended_twice_is_stored_once(store):
    assert append(store, range(12)) == 12
    assert append(store, range(12)) == 0
    assert append(store, range(8, 20)) == 8
    assert len(store) == 20
    keys = lance.dataset(str(store.folder / "vectors.lance")).to_table()["key"].to_pylist()
    assert sorted(keys) == sorted(item.key for item in INPUTS)


def test_the_first_vector_of_an_input_stays(store):
    append(store)
    append(store, vectors=VECTORS + 1)
    np.testing.assert_array_equal(store.read(INPUTS), VECTORS)


def test_missing_inputs_are_named_by_position(store):
    assert store.missing(INPUTS[:3]) == [0, 1, 2]
    append(store, [1, 4])
    assert store.missing(INPUTS[:6]) == [0, 2, 3, 5]
    assert store.missing([]) == []


def test_reading_missing_features_says_to_extract_again(store):
    append(store, range(15))
    with pytest.raises(UserError, match=r"5 of 20 features.*Run the same `llmcond extract` again"):
        store.read(INPUTS)


def test_reading_an_empty_store_says_to_extract_again(store):
    with pytest.raises(UserError, match="llmcond extract"):
        store.read(INPUTS[:1])


def test_instruction_is_part_of_what_a_vector_is_stored_under(store):
    append(store)
    assert store.missing([EncoderInput("text", " 0"), EncoderInput("text 0", "")]) == [0, 1]


def test_truncated_inputs_are_counted(store):
    append(store)
    assert store.count_truncated(INPUTS) == 7
    assert store.count_truncated([INPUTS[0], INPUTS[1], INPUTS[0]]) == 2
    assert store.count_truncated([]) == 0


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"pooling": "cls"}, {"weights": "x"}])
def test_encoders_that_differ_do_not_share_vectors(tmp_path, store, change):
    append(store)
    other = FeatureStore(tmp_path, replace(IDENTITY, **change), "float32")
    assert other.missing(INPUTS) == list(range(20))
    append(other, vectors=-VECTORS)
    np.testing.assert_array_equal(store.read(INPUTS), VECTORS)
    np.testing.assert_array_equal(other.read(INPUTS), -VECTORS)


def test_store_types_do_not_share_vectors(tmp_path, store):
    append(store)
    assert FeatureStore(tmp_path, IDENTITY, "float16").missing(INPUTS) == list(range(20))


def test_a_reopened_store_holds_the_same(tmp_path, store):
    append(store)
    reopened = FeatureStore(tmp_path, IDENTITY, "float32")
    assert len(reopened) == 20
    np.testing.assert_array_equal(reopened.read(INPUTS), VECTORS)


def test_another_handle_sees_rows_after_a_refresh(tmp_path, store):
    append(store, range(5))
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store, range(5, 9))
    assert len(other) == 5
    other.refresh()
    np.testing.assert_array_equal(other.read(INPUTS[:9]), VECTORS[:9])


def test_a_handle_opened_before_the_first_row_sees_it_after_a_refresh(tmp_path, store):
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store)
    other.refresh()
    assert other.missing(INPUTS) == []


def test_a_stale_handle_doubles_nothing(tmp_path, store):
    stale = FeatureStore(tmp_path, IDENTITY, "float32")
    append(store, range(10))
    assert append(stale) == 10
    assert len(stale) == 20


def test_opening_writes_nothing(tmp_path, store):
    assert len(store) == 0
    assert list(tmp_path.iterdir()) == []


def test_store_describes_its_encoder(store):
    append(store)
    description = json.loads((store.folder / "store.json").read_text())
    assert description == {"format": 1, "dtype": "float32", "encoder": IDENTITY.to_json()}


def test_store_of_a_newer_version_is_refused(tmp_path, store):
    append(store)
    (store.folder / "store.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match=r"newer version of llmcond.*pip install --upgrade"):
        FeatureStore(tmp_path, IDENTITY, "float32")


def test_store_without_a_format_is_refused(tmp_path, store):
    append(store)
    (store.folder / "store.json").write_text("{}")
    with pytest.raises(LlmcondError, match="no format version"):
        FeatureStore(tmp_path, IDENTITY, "float32")


def test_a_part_is_claimed_by_one_at_a_time(tmp_path, store):
    other = FeatureStore(tmp_path, IDENTITY, "float32")
    with store.claim("part") as mine:
        assert mine
        with other.claim("part") as theirs, other.claim("another") as another:
            assert not theirs
            assert another
    with other.claim("part") as later:
        assert later
