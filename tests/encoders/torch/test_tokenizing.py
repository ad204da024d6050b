"""From inputs to token ids: agreement with the tokenizer, truncation, and the pooled tokens."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import checkpoints
from helpers.identities import IDENTITY
from helpers.vectors import assert_close
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from llmcond.base.errors import UserError
from llmcond.base.files import digest_bytes
from llmcond.base.package import bundled_names
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.spec import InputError, Router
from llmcond.encoders.tokenizing import InputTokenizer, Tokens
from llmcond.prompts import load_prompt
from llmcond.prompts.template import InputTemplate

pytestmark = pytest.mark.usefixtures("one_thread")

FORMAT = "Instruct: {instruction}\nQuery: {text}"
SHORT = replace(IDENTITY, max_length=62)
TEXTS = [
    "",
    "Two dogs 🐕🐕 run across a field 🌾!",
    "東京は日本の首都です。",
    "A café in Zürich – naïve, isn't it?",
    "\n\t  spaces \u00a0 and {braces} \n",
    "what is written as [SEP] or </s> in a text",
]
PAIRS = [
    ("the colour of the hat", "a red hat"),
    ("a", "a"),
    ("red", "two dogs play in the park at night"),
    ("Is it naïve? 東京", "Two dogs 🐕 run."),
]
LONG = " ".join(["red green blue hat coat rain sun dogs people beach"] * 9)
CONDITION = "the number of people"


def plain_inputs(texts):
    return [EncoderInput("", text) for text in texts]


def pair_inputs(contexts_and_texts):
    return [EncoderInput("", text, context=context) for context, text in contexts_and_texts]


def tokenise(tokenizer, inputs, **changes):
    return InputTokenizer(tokenizer, replace(SHORT, **changes), "tiny")(inputs)


def pooled_tokens(tokenizer, row):
    return tokenizer.convert_ids_to_tokens(row.ids[row.first : row.last])


def decode(tokenizer, row):
    return " ".join(tokenizer.convert_ids_to_tokens(row.ids))


@pytest.fixture(scope="module")
def folders(minilm, tiny_bert, tmp_path_factory):
    """Checkpoints by name: "words" has one token per word, and no pairs."""
    roberta = tmp_path_factory.mktemp("roberta") / "model"
    checkpoints.build_checkpoint("simcse-roberta", roberta)
    return {"minilm": minilm.resolved.checkpoint.folder, "roberta": roberta, "words": tiny_bert}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {kind: AutoTokenizer.from_pretrained(folder) for kind, folder in folders.items()}


@pytest.fixture(params=["minilm", "roberta"])
def tokenizer(request, tokenizers):
    return copy.deepcopy(tokenizers[request.param])


@pytest.fixture
def words(tokenizers):
    return copy.deepcopy(tokenizers["words"])


# -- plain inputs and pairs --------------------------------------------------------------------


def test_plain_inputs_match_tokenizer(tokenizer):
    rows = tokenise(tokenizer, plain_inputs(TEXTS))
    sizes = [(ids, len(ids)) for ids in tokenizer(TEXTS)["input_ids"]]
    assert rows == [Tokens(ids, 0, n, n_tokens=n, second=n) for ids, n in sizes]
    assert tokenise(tokenizer, []) == []
    n_tokens = len(tokenizer(LONG, verbose=False)["input_ids"])
    for side in ("right", "left"):
        tokenizer.truncation_side = side
        for max_length in (8, 13):
            rows = tokenise(tokenizer, plain_inputs([LONG, *TEXTS]), max_length=max_length)
            options = {"truncation": True, "max_length": max_length}
            assert [row.ids for row in rows] == tokenizer([LONG, *TEXTS], **options)["input_ids"]
            assert rows[0].n_tokens == n_tokens > max_length


def test_pairs_match_tokenizer_and_pool_their_text(tokenizer):
    inputs = [*plain_inputs(["rain"]), *pair_inputs([*PAIRS, ("", "two dogs play")])]
    plain, *rows, without_context = tokenise(tokenizer, inputs)
    assert plain.ids == tokenizer("rain")["input_ids"]
    for (context, text), row in zip(PAIRS, rows, strict=True):
        encoded = tokenizer(context, text, return_token_type_ids=True)
        assert row.ids == encoded["input_ids"]
        assert row.n_tokens == len(row.ids)
        inside = [row.first <= position < row.last for position in range(len(row.ids))]
        assert inside == [half == 1 for half in encoded.sequence_ids(0)]
        types = [int(position >= row.second) for position in range(len(row.ids))]
        assert types == encoded["token_type_ids"]
    assert without_context.ids == tokenizer("two dogs play")["input_ids"]
    assert pooled_tokens(tokenizer, without_context) == tokenizer.tokenize("two dogs play")
    # A pair is pooled over its text, whatever the setting.
    assert tokenise(tokenizer, inputs[1:], pool_over="text") == [*rows, without_context]


def test_context_is_cut_before_text(tokenizer):
    options = {"truncation": "only_first", "max_length": 20}
    (row,) = tokenise(tokenizer, pair_inputs([(LONG, "a red hat")]), max_length=20)
    assert row.ids == tokenizer(LONG, "a red hat", **options)["input_ids"]
    assert pooled_tokens(tokenizer, row) == tokenizer.tokenize("a red hat")
    assert row.n_tokens == len(tokenizer(LONG, "a red hat", verbose=False)["input_ids"])
    (row,) = tokenise(tokenizer, pair_inputs([("rain sun", LONG)]), max_length=20)
    special = tokenizer.num_special_tokens_to_add(pair=True)
    assert row.first == special - 1  # no token of the context is left before the text
    assert pooled_tokens(tokenizer, row) == tokenizer.tokenize(LONG)[: 20 - special]


@pytest.mark.parametrize("kind", ["minilm", "roberta"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_pool_states_of_the_text(folders, tokenizers, kind, pooling):
    settings = {"pooling": pooling, "pool_over": "text", "normalize": False}
    settings |= {"instruction_format": "{text} ({instruction})"}
    encoder = load_encoder(str(folders[kind]), dtype="float32", device="cpu", **settings)
    tokenizer = tokenizers[kind]
    model = AutoModel.from_pretrained(folders[kind], dtype="float32").eval()
    encoded = [(tokenizer(*pair, return_tensors="pt"), None) for pair in PAIRS]
    encoded += [(tokenizer("red hat (colour)", return_tensors="pt"), "red hat (colour)")]
    expected = []
    for batch, string in encoded:
        inside = [half == 1 for half in batch.sequence_ids(0)]
        if string is not None:
            inside = overlapping_positions(tokenizer, string, 0, len("red hat"))
        with torch.no_grad():
            states = model(**batch).last_hidden_state[0, inside]
        expected.append(states.mean(dim=0) if pooling == "mean" else states[-1])
    items = [*pair_inputs(PAIRS), EncoderInput("colour", "red hat")]
    assert_close(encoder.encode(items), np.stack(expected))
    assert_close(np.concatenate([encoder.encode([item]) for item in items]), np.stack(expected))


# -- the sentence is cut, and nothing else -----------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_only_the_sentence_of_a_prompt_is_cut(tokenizers, side):
    tokenizer = copy.deepcopy(tokenizers["minilm"])
    tokenizer.truncation_side = side
    sentence = f"{LONG} {LONG}"
    sentence_ids = " ".join(map(str, tokenizer(sentence)["input_ids"]))
    prompts = [load_prompt(name) for name in bundled_names("prompts")]
    parts = [part for prompt in prompts for part in (prompt.conditional, prompt.unconditional)]
    n_cut = 0
    for item in (part.render(sentence, CONDITION) for part in parts):
        (cut,), (whole,) = (
            tokenise(tokenizer, [item], instruction_format=FORMAT, max_length=max_length)
            for max_length in (100, 9_999)
        )
        assert len(cut.ids) == min(100, len(whole.ids))
        assert cut.n_tokens == len(whole.ids)
        n_removed = len(whole.ids) - len(cut.ids)
        starts = range(len(cut.ids) + 1)
        start = next(i for i in starts if whole.ids[:i] + whole.ids[i + n_removed :] == cut.ids)
        assert " ".join(map(str, whole.ids[start : start + n_removed])) in sentence_ids
        n_cut += n_removed > 0
    assert n_cut > len(prompts)


def test_repeated_sentence_is_cut_in_both_positions(words, monkeypatch):
    item = InputTemplate("{sentence} red , {condition} : {sentence} blue").render(
        "dogs play in the park at night", "rain"
    )
    (row,) = tokenise(words, [item], max_length=12)
    assert decode(words, row) == "[CLS] dogs play red , rain : dogs play blue [SEP]"
    monkeypatch.setattr(type(words), "is_fast", False)
    assert tokenise(words, [item], max_length=12) == [row]
    with pytest.raises(UserError, match="needs a fast tokenizer"):
        tokenise(words, [item], pool_over="text")


def test_input_too_long_without_its_sentence_is_rejected_with_lengths(words):
    item = InputTemplate("{sentence} {condition}").render("red hat", LONG)
    message = "'red hat .* 94 tokens, of which 2 may be cut, but tiny takes at most 20"
    with pytest.raises(InputError, match=message) as error:
        tokenise(words, [item], max_length=20)
    assert error.value.item == item


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


# -- pooling over the text ---------------------------------------------------------------------


def overlapping_positions(tokenizer, string, begin, end):
    """Return the positions of the tokens with a character between ``begin`` and ``end``."""
    encoded = tokenizer(string, return_offsets_mapping=True)
    spans = zip(encoded["offset_mapping"], encoded.sequence_ids(0), strict=True)
    return [
        position
        for position, ((start, stop), half) in enumerate(spans)
        if half is not None and start < end and stop > begin
    ]


@pytest.mark.parametrize("template", [FORMAT, "{text}\n({instruction})", "{instruction}|{text}!"])
def test_pooled_tokens_cover_exactly_the_text(tokenizer, template):
    for text in ("red hat", "Two dogs 🐕🐕 run.", "東京は 日本", "  a  ", "the colour"):
        item = EncoderInput("the colour", text)
        (row,) = tokenise(tokenizer, [item], instruction_format=template, pool_over="text")
        string = template.format(instruction="the colour", text=text)
        begin = len(template.partition("{text}")[0].format(instruction="the colour"))
        assert row.ids == tokenizer(string)["input_ids"]
        expected = overlapping_positions(tokenizer, string, begin, begin + len(text))
        assert list(range(row.first, row.last)) == expected


def test_pool_over_sets_pooled_tokens(words):
    for pool_over, changes, pooled in (
        ("text", {"special_tokens": "[CLS] {text}"}, "red hat"),
        ("text", {"max_length": 6}, "red"),
        # NV-Embed-v2 masks as many tokens as the instruction has, and the first is [CLS].
        ("after-instruction", {}, ": red hat [SEP]"),
        ("all", {}, "[CLS] a the : red hat [SEP]"),
    ):
        settings = {"instruction_format": "{instruction} : {text}", **changes}
        item = EncoderInput("a the", "red hat")
        (row,) = tokenise(words, [item], pool_over=pool_over, **settings)
        assert pooled_tokens(words, row) == pooled.split()


# -- special tokens ----------------------------------------------------------------------------


@pytest.fixture(params=["$A", "<s> $A", "<s> $A </s>"])
def decoder_tokenizer(request):
    """A decoder's tokenizer that adds no special tokens, one in front, or one at either end."""
    vocabulary = ["<unk>", "<s>", "</s>", *dict.fromkeys(LONG.split()), "a", "colour"]
    model = models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=request.param, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_special_tokens_setting_surrounds_every_input_once(decoder_tokenizer):
    texts = ["red hat", "", LONG]
    for special_tokens, first, last in (
        ("<s> {text} </s>", ["<s>"], ["</s>"]),
        ("<unk>{text}", ["<unk>"], []),
    ):
        options = {"special_tokens": special_tokens, "max_length": 12}
        rows = tokenise(decoder_tokenizer, plain_inputs(texts), **options)
        for text, row in zip(texts, rows, strict=True):
            content = text.split()[: 12 - len(first) - len(last)]
            assert decode(decoder_tokenizer, row).split() == [*first, *content, *last]
            assert row.n_tokens == len(first) + len(text.split()) + len(last)
    rows = tokenise(decoder_tokenizer, plain_inputs(["red hat", LONG]), max_length=12)
    expected = decoder_tokenizer(["red hat", LONG], truncation=True, max_length=12)["input_ids"]
    assert [row.ids for row in rows] == expected
    with pytest.raises(UserError, match=r"needs the token <bos> .* tokenizer does not have it"):
        tokenise(decoder_tokenizer, plain_inputs(["red"]), special_tokens="<bos> {text}")


# -- errors ------------------------------------------------------------------------------------


def test_unsupported_inputs_are_rejected(words):
    rain = EncoderInput("", "red hat", context="rain")
    special = {"special_tokens": "[CLS] {text} [SEP]"}
    rows = [
        (EncoderInput("", "", context="red"), {}, r"the text '' has no tokens"),
        (replace(rain, instruction="find"), {}, r"instruction \('find'\) and a context \('rain'\)"),
        (rain, {"pooling": "cls"}, "pools by cls.*--pooling mean"),
        (rain, special, r"reads one text between .*, not a pair.*instruction"),
        (EncoderInput("find", "red"), {}, "tiny takes no instruction, but the input has 'find'"),
    ]
    for item, changes, message in rows:
        with pytest.raises(UserError, match=message):
            tokenise(words, [item], **changes)
    broken = Tokenizer(models.WordLevel({"a": 0, "1": 1}, unk_token="[UNK]"))
    with pytest.raises(UserError, match=r"tokenizer of tiny cannot read a text: .*UNK"):
        tokenise(PreTrainedTokenizerFast(tokenizer_object=broken), plain_inputs(["b"]))


# -- keys --------------------------------------------------------------------------------------


def test_key_depends_on_boundaries_of_texts_and_on_router():
    texts = [("a", "b", None), ("a", "b", ""), ("a", "", "b"), ("", "a", "b"), ("", "ab", "")]
    texts += [("", 'a", "b', None), ("a\0", "b", None)]
    routers = ("x", 0.1, True, True), ("y", 0.1, True, True), ("x", 0.2, True, True)
    routers = (*routers, ("x", 0.1, False, True), ("x", 0.1, True, False))
    items = [EncoderInput(*fields) for fields in texts]
    items += [EncoderInput("a", "b", router=Router(*fields)) for fields in routers]
    assert len({item.key for item in items}) == len(items)
    # Existing feature stores use this key, which is older than contexts.
    expected = digest_bytes(json.dumps(["find", "ä text"]).encode(), size=16)
    assert EncoderInput("find", "ä text").key == expected
    assert EncoderInput("", "a text").key.hex() == "785afe0d0546a202bc779d26f9d5ec54"


# -- two sentences and a condition in one sequence ---------------------------------------------

LONG_SENTENCE = "two men walk in the park at night in the rain on the street"
OTHER_SENTENCE = "three women sit on the street and read in the morning in the sun"


def join_texts(tokenizer, *row, **changes):
    identity = replace(IDENTITY, **{"max_length": 20, "pool_over": "all", **changes})
    (tokens,) = InputTokenizer(tokenizer, identity, "tiny").join_rows([row])
    return tokens, tokenizer.decode(tokens.ids)


def test_joined_texts_match_code_of_c_sts(words):
    """The texts are joined with the text of the separator, as in the authors' code."""
    row = "dogs play", "children sit", CONDITION
    ids = words(" [SEP] ".join(row))["input_ids"]
    assert join_texts(words, *row)[0] == Tokens(ids, 0, len(ids), len(ids), len(ids))
    assert join_texts(words, *row, pool_over="text")[0] == Tokens(
        ids, 1, len(ids) - 1, len(ids), len(ids)
    )


def test_long_joined_sentences_share_remaining_tokens(words):
    row = LONG_SENTENCE, LONG_SENTENCE, CONDITION
    for first, side, expected in (
        # Of 20 tokens, 4 are special and 4 belong to the condition, so 6 are left per sentence.
        (OTHER_SENTENCE, "right", "three women sit on the street [SEP] two men walk in the park"),
        (OTHER_SENTENCE, "left", "in the morning in the sun [SEP] in the rain on the street"),
        # A short sentence leaves more tokens to the other.
        ("dogs play", "right", "dogs play [SEP] two men walk in the park at night in the"),
    ):
        words.truncation_side = side
        tokens, text = join_texts(words, first, *row[1:])
        assert text == f"[CLS] {expected} [SEP] {CONDITION} [SEP]"
        assert tokens.n_tokens == 8 + len(first.split()) + len(LONG_SENTENCE.split())
    with pytest.raises(UserError, match=r"has 4 tokens, which leave no room .* larger max_length"):
        join_texts(words, *row, max_length=9)
    words.sep_token, words.eos_token = None, None
    with pytest.raises(UserError, match="neither a separator nor an end token"):
        join_texts(words, "a", "a", CONDITION)


@pytest.mark.processor
def test_vectors_of_joined_texts_do_not_depend_on_batch(tiny_bert):
    encoder = load_encoder(tiny_bert, dtype="float32", device="cpu", max_length=20)
    sentences = [LONG_SENTENCE, "dogs play", "children", "a dog", "two men in a red hat"]
    rows = [(a, b, c) for a in sentences for b in sentences for c in (CONDITION, "the mood")]
    with pytest.warns(UserWarning, match=r"18 of 50 rows .* their sentences were cut"):
        together = encoder.encode_joined(rows)
    for index in (1, 17, 33, 49):
        assert_close(encoder.encode_joined([rows[index]])[0], together[index])
