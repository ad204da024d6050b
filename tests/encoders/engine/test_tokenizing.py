"""From inputs to token ids: agreement with the tokenizer, truncation, and the pooled tokens."""

import copy
import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.identities import IDENTITY
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from llmcond.bundled import bundled_names
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.engine.tokenizing import InputTokenizer
from llmcond.encoders.spec import InputError
from llmcond.errors import UserError
from llmcond.files import digest_bytes
from llmcond.prompts import load_prompt
from llmcond.prompts.template import InputTemplate

FORMAT = "Instruct: {instruction}\nQuery: {text}"
SHORT = replace(IDENTITY, max_length=62)
TEXTS = [
    "",
    "a",
    "red hat",
    "Two dogs 🐕🐕 run across a field 🌾!",
    "東京は日本の首都です。",
    "A café in Zürich – naïve, isn't it?",
    "\n\t  spaces \u00a0 and {braces} \n",
    "what is written as [SEP] or </s> in a text",
    "the number of people at the beach in the morning .",
]
PAIRS = [
    ("the colour of the hat", "a red hat"),
    ("a", "a"),
    ("red", "two dogs play in the park at night"),
    ("Is it naïve? 東京", "Two dogs 🐕 run."),
]
LONG = " ".join(["red green blue hat coat rain sun dogs people beach"] * 9)


def plain_inputs(texts):
    return [EncoderInput("", text) for text in texts]


def pair_inputs(contexts_and_texts):
    return [EncoderInput("", text, context=context) for context, text in contexts_and_texts]


def tokenise(tokenizer, inputs, **changes):
    return InputTokenizer(tokenizer, replace(SHORT, **changes), "tiny")(inputs)


def pooled_tokens(tokenizer, row):
    return tokenizer.convert_ids_to_tokens(row.ids[row.first : row.last])


def add_pairs(tokenizer):
    """Return a copy of the tiny BERT's tokenizer that encodes pairs as BERT does."""
    from tokenizers import processors

    tokenizer_copy = copy.deepcopy(tokenizer)
    tokenizer_copy.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer_copy


@pytest.fixture(scope="module")
def bert_folder(tiny_checkpoint, tmp_path_factory):
    """A tiny BERT whose tokenizer supports pairs."""
    from transformers import AutoTokenizer, BertModel

    source = tiny_checkpoint()
    folder = tmp_path_factory.mktemp("pairs")
    add_pairs(AutoTokenizer.from_pretrained(source)).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    BertModel.from_pretrained(source, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def roberta_folder(tmp_path_factory):
    """A tiny RoBERTa with a byte-level tokenizer, where a pair is <s> a </s></s> b </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([LONG, "the number of people at the park"], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=62,
    )
    torch.manual_seed(0)
    model = RobertaModel(
        RobertaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=64,
            type_vocab_size=1,
            pad_token_id=1,
        ),
        add_pooling_layer=False,
    )
    folder = tmp_path_factory.mktemp("roberta")
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(minilm, bert_folder, roberta_folder):
    return {
        "minilm": minilm.resolved.checkpoint.folder,
        "bert": bert_folder,
        "roberta": roberta_folder,
    }


@pytest.fixture(scope="module")
def tokenizers(folders):
    from transformers import AutoTokenizer

    return {kind: AutoTokenizer.from_pretrained(folder) for kind, folder in folders.items()}


@pytest.fixture(params=["minilm", "bert", "roberta"])
def tokenizer(request, tokenizers):
    return copy.deepcopy(tokenizers[request.param])


# -- plain inputs ------------------------------------------------------------------------------


def test_ids_of_plain_inputs_match_tokenizer(tokenizer):
    rows = tokenise(tokenizer, plain_inputs(TEXTS))
    expected = tokenizer(TEXTS)["input_ids"]
    assert [row.ids for row in rows] == expected
    assert [row.n_tokens for row in rows] == [len(ids) for ids in expected]
    assert all((row.first, row.last, row.second) == (0, len(row.ids), len(row.ids)) for row in rows)


def test_ids_of_loaded_encoder_match_tokenizer(minilm, tokenizers):
    rows = minilm._tokenizer(plain_inputs(TEXTS))
    assert [row.ids for row in rows] == tokenizers["minilm"](TEXTS)["input_ids"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("max_length", [8, 13, 62])
def test_truncation_matches_tokenizer(tokenizer, max_length, side):
    tokenizer.truncation_side = side
    texts = [LONG, *TEXTS]
    rows = tokenise(tokenizer, plain_inputs(texts), max_length=max_length)
    expected = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
    assert [row.ids for row in rows] == expected
    assert rows[0].n_tokens == len(tokenizer(LONG, verbose=False)["input_ids"]) > max_length


def test_plain_inputs_and_pairs_stay_in_order(tokenizer):
    inputs = [EncoderInput("", "red"), *pair_inputs([("hat", "blue")]), EncoderInput("", "rain")]
    expected = [tokenizer("red"), tokenizer("hat", "blue"), tokenizer("rain")]
    assert [row.ids for row in tokenise(tokenizer, inputs)] == [e["input_ids"] for e in expected]


def test_no_inputs_give_no_rows(tokenizer):
    assert tokenise(tokenizer, []) == []


# -- pairs -------------------------------------------------------------------------------------


def test_ids_of_pairs_match_tokenizer(tokenizer):
    rows = tokenise(tokenizer, pair_inputs(PAIRS))
    expected = tokenizer(*zip(*PAIRS, strict=True))["input_ids"]
    assert [row.ids for row in rows] == expected
    assert [row.n_tokens for row in rows] == [len(ids) for ids in expected]


def test_roberta_pair_has_two_end_tokens_in_between(tokenizers):
    (row,) = tokenise(tokenizers["roberta"], pair_inputs([("red", "blue hat")]))
    text = "".join(tokenizers["roberta"].convert_ids_to_tokens(row.ids))
    assert text == "<s>red</s></s>blueĠhat</s>"


def test_pooled_tokens_of_a_pair_are_the_second_text(tokenizer):
    for (context, text), row in zip(PAIRS, tokenise(tokenizer, pair_inputs(PAIRS)), strict=True):
        halves = tokenizer(context, text).sequence_ids(0)
        inside = [row.first <= position < row.last for position in range(len(row.ids))]
        assert inside == [half == 1 for half in halves]


def test_empty_context_pools_tokens_of_text_only(tokenizer):
    (row,) = tokenise(tokenizer, pair_inputs([("", "two dogs play")]))
    (alone,) = tokenise(tokenizer, plain_inputs(["two dogs play"]))
    assert row.ids == alone.ids == tokenizer("two dogs play")["input_ids"]
    assert pooled_tokens(tokenizer, row) == tokenizer.tokenize("two dogs play")
    assert (alone.first, alone.last) == (0, len(alone.ids))  # with the special tokens
    assert row.second == len(row.ids)


def test_context_is_truncated_before_text(tokenizer):
    text = "a red hat"
    (row,) = tokenise(tokenizer, pair_inputs([(LONG, text)]), max_length=20)
    expected = tokenizer(LONG, text, truncation="only_first", max_length=20)
    assert row.ids == expected["input_ids"]
    assert len(row.ids) == 20
    assert pooled_tokens(tokenizer, row) == tokenizer.tokenize(text)
    assert row.n_tokens == len(tokenizer(LONG, text, verbose=False)["input_ids"])


def test_text_is_truncated_if_no_context_is_left(tokenizer):
    (row,) = tokenise(tokenizer, pair_inputs([("rain sun", LONG)]), max_length=20)
    special = tokenizer.num_special_tokens_to_add(pair=True)
    assert len(row.ids) == 20
    assert pooled_tokens(tokenizer, row) == tokenizer.tokenize(LONG)[: 20 - special]
    assert row.first == special - 1  # no token of the context is left before the text


# -- inputs beyond the maximum length ----------------------------------------------------------

CONDITION = "the number of people"


@pytest.mark.matrix
@pytest.mark.parametrize("name", bundled_names("prompts"))
@pytest.mark.parametrize("side", ["right", "left"])
def test_only_the_sentence_of_a_template_is_truncated(tokenizers, name, side):
    tokenizer = copy.deepcopy(tokenizers["minilm"])
    tokenizer.truncation_side = side
    prompt, sentence = load_prompt(name), f"{LONG} {LONG}"
    for part in (prompt.conditional, prompt.unconditional):
        item = part.render(sentence, CONDITION)
        settings = {"instruction_format": FORMAT, "max_length": 100}
        (cut,) = tokenise(tokenizer, [item], **settings)
        (whole,) = tokenise(tokenizer, [item], **{**settings, "max_length": 9_999})
        assert len(cut.ids) == min(100, len(whole.ids))
        assert cut.n_tokens == whole.n_tokens == len(whole.ids)
        n_removed = len(whole.ids) - len(cut.ids)
        starts = range(len(cut.ids) + 1)
        start = next(i for i in starts if whole.ids[:i] + whole.ids[i + n_removed :] == cut.ids)
        removed = " ".join(map(str, whole.ids[start : start + n_removed]))
        assert removed in " ".join(map(str, tokenizer(sentence)["input_ids"]))


def test_long_sentence_does_not_truncate_condition(minilm):
    sentence = " ".join(["Two dogs run across a wide field in the morning sun."] * 60)
    part = load_prompt("concat-sent-cond").conditional
    with pytest.warns(UserWarning, match="2 of 2 inputs are longer .* sentences were cut"):
        first, second = minilm.encode(
            [part.render(sentence, condition) for condition in ("the place", "the activity")]
        )
    assert np.abs(first - second).max() > 0.01


def test_repeated_sentence_is_truncated_in_both_positions(tokenizers):
    part = InputTemplate("{sentence} red , {condition} : {sentence} blue")
    item = part.render("dogs play in the park at night", "rain")
    (row,) = tokenise(tokenizers["bert"], [item], max_length=12)
    words = tokenizers["bert"].convert_ids_to_tokens(row.ids)
    assert words == "[CLS] dogs play red , rain : dogs play blue [SEP]".split()


def test_braces_and_other_placeholders_are_not_sentence_spans():
    item = InputTemplate("{condition}: {sentence}", instruction="about {sentence}").render(
        "a {b}", "c"
    )
    assert item.sentence == (("instruction", 6, 11), ("text", 3, 8))
    assert item == EncoderInput("about a {b}", "c: a {b}")
    assert item.key == EncoderInput("about a {b}", "c: a {b}").key


@pytest.mark.parametrize(
    "template", [InputTemplate("{condition}"), InputTemplate("{sentence} {condition}")]
)
def test_condition_is_never_truncated(tokenizers, template):
    item = template.render("dogs", LONG)
    with pytest.raises(InputError, match=r"too long without its sentence.*--max-length") as error:
        tokenise(tokenizers["bert"], [item], max_length=20)
    assert error.value.item == item


def test_slow_tokenizers_keep_condition_too(tokenizers, monkeypatch):
    item = InputTemplate("{sentence} : {condition}").render(LONG, "rain")
    (fast,) = tokenise(tokenizers["bert"], [item], max_length=20)
    monkeypatch.setattr(type(tokenizers["bert"]), "is_fast", False)
    assert tokenise(tokenizers["bert"], [item], max_length=20) == [fast]


@pytest.mark.parametrize(("pool_over", "first"), [("text", 6), ("after-instruction", 5)])
def test_truncated_instruction_is_not_pooled(tokenizers, pool_over, first):
    item = InputTemplate("{condition}", instruction="retrieve : {sentence}").render(LONG, "red hat")
    settings = {"instruction_format": "{instruction} {text}", "pool_over": pool_over}
    (row,) = tokenise(tokenizers["bert"], [item], **settings, max_length=9)
    words = tokenizers["bert"].convert_ids_to_tokens(row.ids)
    assert words == "[CLS] retrieve : red green blue red hat [SEP]".split()
    assert row.first == first


def test_tokenizer_error_is_reported():
    words = Tokenizer(models.WordLevel({"a": 0, "1": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(UserError, match=r"tokenizer of tiny cannot read a text: .*UNK"):
        tokenise(tokenizer, plain_inputs(["b"]))


def test_windows_cover_sentence_and_repeat_condition(tokenizers):
    tokenizer = tokenizers["minilm"]
    item = InputTemplate("{sentence} : {condition}").render(LONG, "rain")
    identity = replace(SHORT, max_length=20, long_texts="windows")
    (rows,) = InputTokenizer(tokenizer, identity, "tiny").windows([item])
    ending = tokenizer(": rain")["input_ids"][1:]
    assert all(len(row.ids) <= 20 and row.ids[-len(ending) :] == ending for row in rows)
    sentence = [token for row in rows for token in row.ids[1 : -len(ending)]]
    assert sentence == tokenizer(LONG, add_special_tokens=False)["input_ids"]
    assert len({len(row.ids) for row in rows}) <= 2  # equally long


@contextmanager
def record_calls(encoder):
    """Yield a list that collects the keyword arguments of each forward pass, without packing."""
    recorded = []
    packs, encoder.engine.packs = encoder.engine.packs, False
    handle = encoder.engine.model.network.register_forward_pre_hook(
        lambda _module, _positional, named: recorded.append(named), with_kwargs=True
    )
    yield recorded
    encoder.engine.packs = packs
    handle.remove()


@pytest.fixture(scope="module")
def encoders(folders):
    """Encoders whose vectors are means, of unit norm."""
    options = {"dtype": "float32", "device": "cpu", "runtime": "torch", "pooling": "mean"}
    names = {"minilm": "minilm", **{kind: str(folders[kind]) for kind in ("bert", "roberta")}}
    return {kind: load_encoder(name, **options) for kind, name in names.items()}


@pytest.mark.parametrize("kind", ["minilm", "bert", "roberta"])
def test_network_receives_tokenizer_output_for_pairs(encoders, tokenizers, kind):
    for context, text in PAIRS:
        with record_calls(encoders[kind]) as recorded:
            encoders[kind].encode(pair_inputs([(context, text)]))
        expected = tokenizers[kind](context, text, return_tensors="pt")
        assert set(recorded[0]) == set(expected)
        assert ("token_type_ids" in recorded[0]) == (kind != "roberta")
        for name, values in expected.items():
            torch.testing.assert_close(recorded[0][name], values)


@pytest.mark.parametrize("kind", ["minilm", "bert"])
def test_token_types_in_batch_match_tokenizer(encoders, tokenizers, kind):
    tokenizer = tokenizers[kind]
    text_pairs, texts = PAIRS[:2], ["rain", "a red hat in rain"]
    with record_calls(encoders[kind]) as recorded:
        encoders[kind].encode([*pair_inputs(text_pairs), *plain_inputs(texts)])
    (batch,) = recorded
    expected = [tokenizer(*pair) for pair in text_pairs] + [tokenizer(text) for text in texts]
    rows = zip(batch["attention_mask"].tolist(), batch["token_type_ids"].tolist(), strict=True)
    # Batches are sorted by length.
    assert sorted(types[: sum(mask)] for mask, types in rows) == sorted(
        entry["token_type_ids"] for entry in expected
    )
    assert not batch["token_type_ids"][batch["attention_mask"] == 0].any()


def test_roberta_token_types_match_tokenizer(tokenizers):
    # RoBERTa has one token type only. If its tokenizer returns token types, they are all 0.
    tokenizer = copy.deepcopy(tokenizers["roberta"])
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    (row,) = tokenise(tokenizer, pair_inputs([("red", "hat")]))
    types = [int(position >= row.second) for position in range(len(row.ids))]
    assert types == tokenizer("red", "hat")["token_type_ids"]


@pytest.mark.parametrize("kind", ["minilm", "bert", "roberta"])
def test_pair_vector_is_mean_of_hidden_states_of_text(encoders, folders, tokenizers, kind):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folders[kind], dtype="float32").eval()
    vectors = encoders[kind].encode(pair_inputs(PAIRS))
    for (context, text), vector in zip(PAIRS, vectors, strict=True):
        encoded = tokenizers[kind](context, text, return_tensors="pt")
        inside = [half == 1 for half in encoded.sequence_ids(0)]
        with torch.no_grad():
            mean = model(**encoded).last_hidden_state[0, inside].mean(dim=0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


def test_last_token_pooling_of_a_pair_skips_special_tokens(roberta_folder, tokenizers):
    from transformers import AutoModel

    encoder = load_encoder(
        str(roberta_folder), dtype="float32", device="cpu", pooling="last", normalize=False
    )
    encoded = tokenizers["roberta"]("the colour", "red hat", return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(roberta_folder).eval()(**encoded).last_hidden_state[0]
    (vector,) = encoder.encode(pair_inputs([("the colour", "red hat")]))
    np.testing.assert_allclose(vector, hidden[-2].numpy(), atol=1e-5)


def test_context_changes_vector(minilm):
    contexts = ["the colour", "rain", "", None]
    vectors = minilm.encode([EncoderInput("", "a red hat", context=c) for c in contexts])
    for first, second in pairwise(vectors):
        assert np.abs(first - second).max() > 0.01


def test_pair_whose_text_has_no_tokens_is_rejected(tokenizer):
    with pytest.raises(UserError, match=r"the text '' has no tokens"):
        tokenise(tokenizer, pair_inputs([("red", "")]))


def test_instruction_and_context_together_are_rejected(tokenizer):
    item = EncoderInput("find", "red hat", context="rain")
    with pytest.raises(UserError, match=r"both an instruction \('find'\) and a context \('rain'\)"):
        tokenise(tokenizer, [item], instruction_format=FORMAT)


@pytest.mark.parametrize("pooling", ["cls", "pooler", "latent"])
@pytest.mark.parametrize("context", ["rain", ""])
def test_context_is_rejected_for_other_poolings(tokenizer, pooling, context):
    with pytest.raises(UserError, match=rf"pools by {pooling}.*--pooling mean"):
        tokenise(tokenizer, pair_inputs([(context, "red hat")]), pooling=pooling)


def test_context_is_rejected_with_special_tokens_for_one_text(tokenizers):
    with pytest.raises(UserError, match=r"reads one text between .*, not a pair.*instruction"):
        tokenise(
            tokenizers["bert"], pair_inputs([("rain", "red")]), special_tokens="[CLS] {text} [SEP]"
        )


# -- hypothesis --------------------------------------------------------------------------------

ANY_TEXT = st.text(max_size=40) | st.lists(st.sampled_from(LONG.split()), max_size=40).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["minilm", "bert", "roberta"]),
    text=ANY_TEXT,
    context=st.none() | ANY_TEXT,
    max_length=st.integers(8, 30),
)
def test_truncated_inputs_keep_special_tokens_and_fit(tokenizers, kind, text, context, max_length):
    tokenizer = tokenizers[kind]
    item = EncoderInput("", text, context=context)
    text_tokens = tokenizer.tokenize(text)
    if context is not None and not text_tokens:
        with pytest.raises(UserError, match=r"too long without|has no tokens"):
            tokenise(tokenizer, [item], max_length=max_length)
        return
    (row,) = tokenise(tokenizer, [item], max_length=max_length)
    assert (row.ids[0], row.ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert len(row.ids) == min(row.n_tokens, max_length)
    assert 0 <= row.first < row.last <= len(row.ids)
    if context is None:
        assert row.ids == tokenizer(text, truncation=True, max_length=max_length)["input_ids"]
    else:
        special = tokenizer.num_special_tokens_to_add(pair=bool(context))
        assert pooled_tokens(tokenizer, row) == text_tokens[: max_length - special]


# -- pooling over the text ---------------------------------------------------------------------

FORMATS = [
    FORMAT,
    "{instruction}{text}",
    "task: {instruction} | {text} !",
    "{text}\n({instruction})",
]


def overlapping_positions(tokenizer, formatted, begin, end):
    """Return the positions of the tokens with a character between ``begin`` and ``end``."""
    encoded = tokenizer(formatted, return_offsets_mapping=True)
    spans = zip(encoded["offset_mapping"], encoded.sequence_ids(0), strict=True)
    return [
        position
        for position, ((start, stop), half) in enumerate(spans)
        if half is not None and start < end and stop > begin
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("template", FORMATS)
@pytest.mark.parametrize("text", ["red hat", "Two dogs 🐕🐕 run.", "東京は 日本", "  a  "])
def test_pooled_tokens_cover_exactly_the_text(tokenizer, template, text):
    item = EncoderInput("retrieve the colour", text)
    (row,) = tokenise(tokenizer, [item], instruction_format=template, pool_over="text")
    formatted = template.format(instruction=item.instruction, text=text)
    begin = template.partition("{text}")[0].format(instruction=item.instruction)
    assert row.ids == tokenizer(formatted)["input_ids"]
    expected = overlapping_positions(tokenizer, formatted, len(begin), len(begin) + len(text))
    assert list(range(row.first, row.last)) == expected


def test_text_equal_to_instruction_is_pooled_once(tokenizers):
    item = EncoderInput("red hat", "red hat")
    (row,) = tokenise(tokenizers["minilm"], [item], instruction_format=FORMAT, pool_over="text")
    assert pooled_tokens(tokenizers["minilm"], row) == ["red", "hat"]
    assert row.last == len(row.ids) - 1  # the second of the two, before [SEP]


def test_text_without_instruction_is_pooled_without_special_tokens(tokenizer):
    (row,) = tokenise(tokenizer, plain_inputs(["two dogs play"]), pool_over="text")
    assert pooled_tokens(tokenizer, row) == tokenizer.tokenize("two dogs play")


def test_truncated_part_of_text_is_not_pooled(tokenizer):
    item = EncoderInput("colour", LONG)
    (row,) = tokenise(
        tokenizer,
        [item],
        instruction_format="{instruction} {text}",
        pool_over="text",
        max_length=20,
    )
    assert len(row.ids) == 20
    assert row.last == 19
    assert row.first == 1 + len(tokenizer.tokenize("colour"))


def test_special_tokens_around_a_text_are_not_pooled(tokenizers):
    (row,) = tokenise(
        tokenizers["bert"],
        [EncoderInput("colour", "red hat")],
        instruction_format="{instruction} : {text}",
        pool_over="text",
        special_tokens="[CLS] {text} [SEP]",
    )
    assert tokenizers["bert"].convert_ids_to_tokens(row.ids) == (
        "[CLS] colour : red hat [SEP]".split()
    )
    assert pooled_tokens(tokenizers["bert"], row) == ["red", "hat"]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vector_over_text_pools_its_hidden_states(folders, tokenizers, pooling):
    from transformers import AutoModel

    encoder = load_encoder(
        str(folders["roberta"]),
        dtype="float32",
        device="cpu",
        pooling=pooling,
        normalize=False,
        pool_over="text",
        instruction_format="{text} ({instruction})",
    )
    (vector,) = encoder.encode([EncoderInput("the colour", "red hat")])
    encoded = tokenizers["roberta"]("red hat (the colour)", return_tensors="pt")
    inside = overlapping_positions(tokenizers["roberta"], "red hat (the colour)", 0, len("red hat"))
    model = AutoModel.from_pretrained(folders["roberta"]).eval()
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state[0, inside]
    expected = hidden.mean(dim=0) if pooling == "mean" else hidden[-1]
    np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_pooling_over_text_does_not_depend_on_batch(folders, kind, pooling):
    encoder = load_encoder(
        str(folders[kind]),
        dtype="float32",
        device="cpu",
        pooling=pooling,
        pool_over="text",
        instruction_format="{instruction} : {text}",
    )
    inputs = [
        EncoderInput("retrieve the number of people", "red"),
        EncoderInput("colour", "two dogs play in the park"),
        *plain_inputs(["rain", "the hat of the men"]),
    ]
    together = encoder.encode(inputs)
    alone = np.concatenate([encoder.encode([item]) for item in inputs])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_pairs_are_pooled_over_text_with_any_pool_over(tokenizer):
    whole, text = (
        tokenise(tokenizer, pair_inputs([*PAIRS, ("", "red hat")]), pool_over=pool_over)
        for pool_over in ("all", "text")
    )
    assert text == whole  # a pair is pooled over its text, whatever the setting


def test_pooling_of_pairs_does_not_depend_on_batch(encoders):
    inputs = [*pair_inputs([*PAIRS, ("", "red hat"), ("rain", "sun")]), *plain_inputs(["rain"])]
    together = encoders["bert"].encode(inputs)
    alone = np.concatenate([encoders["bert"].encode([item]) for item in inputs])
    np.testing.assert_allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("pool_over", ["text", "after-instruction"])
def test_instruction_that_leaves_no_room_is_rejected_with_lengths(tokenizers, pool_over):
    item = EncoderInput("the number of people at the beach in the morning", "red hat")
    expected = r"too long without its sentence: 'red hat'.* 15 tokens, .* 8\..*--max-length"
    with pytest.raises(UserError, match=expected):
        tokenise(
            tokenizers["bert"],
            [item],
            instruction_format="{instruction} : {text}",
            pool_over=pool_over,
            max_length=8,
        )


def test_pooling_after_instruction_skips_as_many_first_tokens(tokenizers):
    # NV-Embed-v2 masks as many tokens as the instruction has, and the first of them is <s>.
    (row,) = tokenise(
        tokenizers["bert"],
        [EncoderInput("find the colour", "red hat")],
        instruction_format="{instruction} : {text}",
        pool_over="after-instruction",
    )
    assert row.ids == tokenizers["bert"]("find the colour : red hat")["input_ids"]
    assert (row.first, row.last) == (4, len(row.ids))


def test_pooling_over_the_text_needs_a_fast_tokenizer(tokenizers, monkeypatch):
    monkeypatch.setattr(type(tokenizers["bert"]), "is_fast", False)
    with pytest.raises(UserError, match="needs a fast tokenizer"):
        tokenise(tokenizers["bert"], plain_inputs(["red"]), pool_over="text")


# -- special tokens ----------------------------------------------------------------------------


@pytest.fixture(params=["none", "<s>", "<s> </s>"])
def decoder_tokenizer(request):
    """A decoder's tokenizer that adds no special tokens, one in front, or one at either end."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *dict.fromkeys(LONG.split()), "a", "colour"]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single = {"none": "$A", "<s>": "<s> $A", "<s> </s>": "<s> $A </s>"}[request.param]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize(
    ("special_tokens", "first", "last"),
    [
        ("<s> {text} </s>", ["<s>"], ["</s>"]),
        ("{text} </s>", [], ["</s>"]),
        ("<s> {text}", ["<s>"], []),
        ("<s>{text}</s>", ["<s>"], ["</s>"]),
    ],
)
def test_special_tokens_setting_surrounds_every_input_once(
    decoder_tokenizer, special_tokens, first, last
):
    texts = ["red hat", "", LONG, "dogs"]
    rows = tokenise(
        decoder_tokenizer, plain_inputs(texts), special_tokens=special_tokens, max_length=12
    )
    for text, row in zip(texts, rows, strict=True):
        words = text.split()[: 12 - len(first) - len(last)]
        assert decoder_tokenizer.convert_ids_to_tokens(row.ids) == [*first, *words, *last]
        assert row.n_tokens == len(first) + len(text.split()) + len(last)


def test_special_tokens_setting_can_be_empty(decoder_tokenizer):
    (row,) = tokenise(decoder_tokenizer, plain_inputs(["red hat"]), special_tokens="{text}")
    assert decoder_tokenizer.convert_ids_to_tokens(row.ids) == ["red", "hat"]


def test_default_special_tokens_match_tokenizer(decoder_tokenizer):
    rows = tokenise(decoder_tokenizer, plain_inputs(["red hat", LONG]), max_length=12)
    texts = ["red hat", LONG]
    expected = decoder_tokenizer(texts, truncation=True, max_length=12)["input_ids"]
    assert [row.ids for row in rows] == expected


@pytest.mark.parametrize("special_tokens", ["<bos> {text}", "{text} <|endoftext|>"])
def test_missing_special_token_is_reported_by_name(decoder_tokenizer, special_tokens):
    token = special_tokens.replace("{text}", "").strip()
    with pytest.raises(UserError) as raised:
        tokenise(decoder_tokenizer, plain_inputs(["red"]), special_tokens=special_tokens)
    assert f"needs the token {token}" in str(raised.value)
    assert "its tokenizer does not have it" in str(raised.value)


def test_unknown_token_is_valid_special_token(decoder_tokenizer):
    (row,) = tokenise(decoder_tokenizer, plain_inputs(["red"]), special_tokens="<unk> {text}")
    assert decoder_tokenizer.convert_ids_to_tokens(row.ids) == ["<unk>", "red"]


@pytest.mark.parametrize(("pad", "expected"), [("<s>", 1), (None, 2)])
def test_padding_defaults_to_end_token(decoder_tokenizer, pad, expected):
    decoder_tokenizer.pad_token = pad
    assert InputTokenizer(decoder_tokenizer, SHORT, "tiny").pad_id == expected


# -- keys --------------------------------------------------------------------------------------


def test_empty_context_differs_from_no_context():
    keys = {EncoderInput("", "red").key, EncoderInput("", "red", context="").key}
    assert len(keys) == 2


def test_key_depends_on_boundaries_of_all_three_texts():
    texts = [
        ("a", "b", None),
        ("a", "b", ""),
        ("a", "", "b"),
        ("", "a", "b"),
        ("", "b", "a"),
        ("", "ab", ""),
        ("", "", "ab"),
        ("", 'a", "b', None),
        ("", "a\0b", None),
    ]
    assert len({EncoderInput(*fields).key for fields in texts}) == len(texts)


@given(instruction=st.text(max_size=20), text=st.text(max_size=20))
def test_key_without_context_is_digest_of_instruction_and_text(instruction, text):
    # Existing feature stores use this key, which is older than contexts.
    expected = digest_bytes(json.dumps([instruction, text]).encode(), size=16)
    assert EncoderInput(instruction, text).key == expected


def make_tokenizer(letters):
    tokenizer = Tokenizer(
        models.BPE({"[CLS]": 0, "[SEP]": 1, **{c: i + 2 for i, c in enumerate(letters)}}, [])
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 0), ("[SEP]", 1)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[SEP]")


def test_special_tokens_are_detected_for_other_alphabets():
    tokenizer = make_tokenizer("бв")
    (row,) = tokenise(tokenizer, plain_inputs(["бв"]))
    assert row.ids == tokenizer("бв")["input_ids"] == [0, 2, 3, 1]


def test_tokenizer_without_tokens_for_simple_texts_is_rejected():
    with pytest.raises(UserError, match="produces no tokens for the simple texts"):
        tokenise(make_tokenizer("ქ"), plain_inputs(["ქ"]))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("abc", "expected a list for inputs, not the str 'abc'"),
        (None, "expected a list for inputs, not the NoneType None"),
        (np.array("abc"), "expected a list for inputs, not the ndarray"),
        (7, "expected a list for inputs, not the int 7"),
        ([None], "the input at position 0 is None, not a text"),
        (EncoderInput("", "a"), "inputs is a single EncoderInput; expected a list"),
        ([5], "the input at position 0 is 5, not a text or an EncoderInput"),
        ([EncoderInput("", "a"), EncoderInput("", 5)], "the text at position 1 is 5"),
        ([EncoderInput(None, "a")], "the instruction at position 0 is None"),
        ([EncoderInput("", "\ud800")], "the text at position 0 is .* half of a surrogate pair"),
        ([EncoderInput("a\0", "b")], "the instruction at position 0 is .* a NUL character"),
    ],
)
def test_invalid_inputs_are_reported_with_position(minilm, inputs, message):
    with pytest.raises(UserError, match=message):
        minilm.encode(inputs)
