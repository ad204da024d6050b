"""Two sentences and a condition in one sequence: special tokens and truncation."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.identities import IDENTITY
from transformers import AutoTokenizer

from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.errors import UserError

pytestmark = pytest.mark.usefixtures("one_thread")

IDENTITY = replace(IDENTITY, max_length=20, pooling="mean", pool_over="all")
CONDITION = "the number of people"
LONG = "two men walk in the park at night in the rain on the street"
SHORT = "dogs play"


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    return tiny_checkpoint()


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def join_texts(tokenizer, *row, **changes):
    (tokens,) = InputTokenizer(tokenizer, replace(IDENTITY, **changes), "tiny").join_rows([row])
    return tokens, tokenizer.decode(tokens.ids)


def test_sequence_matches_code_of_c_sts(tokenizer):
    """The texts are joined with the text of the separator, as in the authors' code."""
    tokens, _ = join_texts(tokenizer, SHORT, "children sit", CONDITION)
    whole = f" {tokenizer.sep_token} ".join([SHORT, "children sit", CONDITION])
    assert tokens.ids == tokenizer(whole)["input_ids"]
    assert (tokens.first, tokens.last, tokens.second) == (0, len(tokens.ids), len(tokens.ids))


def test_special_tokens_are_not_pooled_if_pool_over_is_text(tokenizer):
    tokens, _ = join_texts(tokenizer, SHORT, SHORT, CONDITION, pool_over="text")
    assert (tokens.first, tokens.last) == (1, len(tokens.ids) - 1)


def test_long_sentences_share_remaining_tokens_equally(tokenizer):
    other = "three women sit on the street and read in the morning in the sun"
    tokens, text = join_texts(tokenizer, LONG, other, CONDITION)
    # Of 20 tokens, 4 are special and 4 belong to the condition, so 6 are left per sentence.
    assert text == (
        f"[CLS] two men walk in the park [SEP] three women sit on the street [SEP] {CONDITION} "
        "[SEP]"
    )
    assert (len(tokens.ids), tokens.n_tokens) == (20, 8 + 14 + 14)


@pytest.mark.parametrize("swapped", [False, True])
def test_short_sentence_leaves_more_tokens_to_the_other(tokenizer, swapped):
    rows = (LONG, SHORT) if swapped else (SHORT, LONG)
    tokens, text = join_texts(tokenizer, *rows, CONDITION)
    assert len(tokens.ids) == 20
    assert text.count(SHORT) == text.count(CONDITION) == 1
    assert "two men walk in the park at night in the" in text


def test_truncation_does_not_depend_on_sentence_order(tokenizer):
    other = "three women sit on the street at the beach in the morning"
    first, second = (
        join_texts(tokenizer, *row, "a place")[1] for row in ((LONG, other), (other, LONG))
    )
    assert first.split("[SEP]")[0][6:] == second.split("[SEP]")[1][1:]
    assert first.split("[SEP]")[2] == second.split("[SEP]")[2]


def test_truncation_side_follows_tokenizer(tokenizer):
    tokenizer.truncation_side = "left"
    _, text = join_texts(tokenizer, LONG, LONG, CONDITION)
    assert text.count("the rain on the street [SEP]") == 2
    assert "two men" not in text


@pytest.mark.parametrize(("room", "fits"), [(10, True), (9, False)])
def test_condition_that_leaves_no_room_is_rejected(tokenizer, room, fits):
    if fits:
        assert join_texts(tokenizer, LONG, LONG, CONDITION, max_length=room)[1].count("two") == 2
        return
    with pytest.raises(UserError, match=r"has 4 tokens, which leave no room .* larger max_length"):
        join_texts(tokenizer, LONG, LONG, CONDITION, max_length=room)


def test_end_token_replaces_missing_separator(tokenizer):
    tokenizer.sep_token, tokenizer.eos_token = None, "park"
    tokens, _ = join_texts(tokenizer, SHORT, SHORT, CONDITION)
    assert tokens.ids.count(tokenizer.eos_token_id) == 2
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="neither a separator nor an end token"):
        join_texts(tokenizer, SHORT, SHORT, CONDITION)


@pytest.mark.processor
def test_vectors_do_not_depend_on_batch_size(folder):
    encoder = load_encoder(folder, dtype="float32", device="cpu", max_length=20)
    sentences = [LONG, SHORT, "children", "a dog", "two men in a red hat"]
    rows = [(a, b, c) for a in sentences for b in sentences for c in (CONDITION, "the mood")]
    with pytest.warns(UserWarning, match=r"18 of 50 rows .* their sentences were cut"):
        together = encoder.encode_joined(rows)
    assert together.shape == (50, 32)
    for index in (1, 17, 33, 49):
        alone = encoder.encode_joined([rows[index]])
        np.testing.assert_allclose(alone[0], together[index], atol=1e-5)
    with pytest.raises(UserError, match="the text at position 1 is 3, not a text"):
        encoder.encode_joined([("a", "b", "c"), ("a", 3, "c")])
