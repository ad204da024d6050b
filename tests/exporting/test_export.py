"""Exports give llmcond's vectors in sentence-transformers, and without llmcond where they may."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import checkpoints
from helpers.commands import ok, refused

import llmcond
from llmcond import extract, fit_head
from llmcond.encoders import EncoderOptions
from llmcond.exporting import export as exporting
from llmcond.exporting.modules import to_modules

TEXTS = ["Two women read at the beach.", "three dogs play in the park", "rain " * 90]
#: The second is no name that torch could give a module.
CONDITIONS = ["the place", "the number of `people`, e.g. 2.5", "type"]
HEADS = {
    "linear": ("linear", "concat-sent-cond", {}),
    "mlp": ("mlp", "concat-cond-sent", {"hidden": "12"}),
    "hypernet": ("hypernet", "separate", {"rank": "3"}),
    "relu": ("hypernet", "separate", {"rank": "3", "activation": "relu"}),
    "concat": ("concat", "separate", {}),
    "hadamard": ("hadamard", "separate", {}),
    "plain": ("linear", "concat-cond-sent", {}),
    "towers": ("towers", "separate+concat-sent-cond", {"rank": "3"}),
    "two": ("linear", "concat-sent-cond", {"members": "2"}),
    "pair": ("linear", "pair-cond", {}),
}


pytestmark = pytest.mark.filterwarnings("ignore:. of . inputs are longer:UserWarning")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, tiny_checkpoint, small_rows):
    folder = tmp_path_factory.mktemp("exports")
    lines = ["sentence1,sentence2,condition,label", *(",".join(map(str, r)) for r in small_rows)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    options = EncoderOptions(dtype="float32", device="cpu", pooling="mean", normalize=True)
    prompts = ["separate", "concat-sent-cond", "concat-cond-sent", "pair-cond"]
    own = folder / "run"
    extract(
        model=str(tiny_checkpoint()),
        **vars(options),
        run=own,
        data=str(folder / "rows.csv"),
        prompt=prompts,
    )
    for name, (recipe, prompt, own_settings) in HEADS.items():
        changes = {"epochs": "1", **own_settings}
        subtract = False if name == "plain" else None
        dim = None if recipe == "hadamard" else 16
        fit_head(
            run=own, head=recipe, dim=dim, prompt=prompt, name=name, set=changes, subtract=subtract
        )
    return own


def export(fitted, out, head, *conditions, **more):
    return llmcond.export(run=fitted, out=out, head=head, condition=conditions, **more)


#: Of the head, how many conditions, and who chooses the condition.
PLAIN = {
    "linear": (1, "fixed"),
    "mlp": (1, "fixed"),
    "none": (1, "fixed"),
    "hypernet": (3, "task"),
    "relu": (1, "fixed"),
    "concat": (2, "task"),
    "hadamard": (1, "fixed"),
    "plain": (2, "prompt_name"),
}
_ALONE = """
import json, sys
sys.modules["llmcond"] = None  # an import of it fails
import numpy as np
from sentence_transformers import SentenceTransformer
for out, calls, texts in json.loads(sys.argv[1]):
    model = SentenceTransformer(out, device="cpu")
    np.save(out + "/got.npy", [model.encode(texts, **call) for call in calls])
"""


@pytest.fixture(scope="module")
def exported(fitted, tmp_path_factory):
    """Every plain export, and what sentence-transformers without llmcond makes of texts by it."""
    folder, made, asked = tmp_path_factory.mktemp("plain"), {}, []
    for head, (count, chosen_by) in PLAIN.items():
        prompt = "concat-sent-cond" if head == "none" else None
        made[head] = export(fitted, folder / head, head, *CONDITIONS[:count], prompt=prompt)
        calls = [{} if chosen_by == "fixed" else {chosen_by: one} for one in CONDITIONS[:count]]
        asked.append((str(folder / head), calls, TEXTS))
    subprocess.run([sys.executable, "-c", _ALONE, json.dumps(asked)], check=True)
    return made


@pytest.mark.parametrize("head", PLAIN)
def test_plain_exports_need_no_llmcond(exported, fitted, head):
    made, (count, chosen_by) = exported[head], PLAIN[head]
    assert made.chosen_by == chosen_by
    assert made.difference < 1e-5
    prompt = "concat-sent-cond" if head == "none" else None
    embedder = llmcond.load_embedder(fitted, head, prompt=prompt)
    for condition, got in zip(CONDITIONS[:count], np.load(made.out / "got.npy"), strict=True):
        np.testing.assert_allclose(got, embedder.encode(TEXTS, condition), atol=1e-5)


def test_who_names_no_prompt_gets_the_first_condition(exported, fitted):
    from sentence_transformers import SentenceTransformer

    made = exported["plain"]
    assert "encode_query and encode_document use the first" in " ".join(made.notes)
    model = SentenceTransformer(str(made.out), device="cpu")
    wanted = llmcond.load_embedder(fitted, "plain").encode(TEXTS, CONDITIONS[0])
    for encode in (model.encode, model.encode_query, model.encode_document):
        np.testing.assert_allclose(encode(TEXTS), wanted, atol=1e-5)


def test_other_servers_find_what_they_know(exported):
    for made in exported.values():
        listed = json.loads((made.out / "modules.json").read_text())
        assert [one["type"] for one in listed] == [
            f"sentence_transformers.models.{kind}" for kind in made.modules
        ]
        pooling = json.loads((made.out / "1_Pooling" / "config.json").read_text())
        assert pooling["pooling_mode_mean_tokens"] is True
        assert not [*made.out.rglob("*.bin"), *made.out.rglob("*.py")]


def test_what_others_would_get_wrong_is_said_or_left_out(exported):
    # With no bias the length of the encoder's vectors has no say: nothing stands in between.
    assert exported["relu"].modules == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert exported["relu"].notes == []
    assert exported["linear"].modules.count("Normalize") == 2
    assert "text-embeddings-inference leaves" in " ".join(exported["linear"].notes)
    assert "vLLM" in " ".join(exported["hypernet"].notes)


def test_the_card_says_what_made_it(exported, fitted):
    card = (exported["hypernet"].out / "README.md").read_text()
    assert "task='the place'" in card
    (command,) = re.findall(r"^```bash\n(.*)\n```$", card, re.MULTILINE)
    words = shlex.split(command)
    assert words[:4] == ["llmcond", "export", "--format", "sentence-transformers"]
    assert words[-6:] == [word for one in CONDITIONS for word in ("--condition", one)]
    assert str(fitted.parents[1]) not in card


def test_a_decoder_with_an_instruction(tmp_path, write_rows, small_rows):
    # Its condition stands behind the sentence, its instruction in front of that.
    tiny = checkpoints.make("qwen", tmp_path / "tiny")
    like = EncoderOptions(dtype="float32", device="cpu", like="Qwen/Qwen3-Embedding-0.6B")
    data = str(write_rows(small_rows))
    extract(model=str(tiny.folder), **vars(like), run=tmp_path / "run", data=data, prompt=["cond"])
    made = export(tmp_path / "run", tmp_path / "out", "none", "the place")
    assert made.difference < 1e-5
    own = json.loads((made.out / "config_sentence_transformers.json").read_text())
    assert own["default_prompt_name"] == "default"
    assert own["prompts"]["query"] == own["prompts"]["document"] == own["prompts"]["default"] != ""
    assert "config_sentence_transformers.json must be given" in " ".join(made.notes)


def test_any_condition(one_thread, fitted, tmp_path):
    made = export(fitted, tmp_path / "any", "towers")
    assert (made.chosen_by, made.difference) == ("any", 0)
    moved = shutil.move(tmp_path / "any", tmp_path / "elsewhere")
    model = llmcond.load_sentence_transformer(moved)
    embedder = llmcond.load_embedder(fitted, "towers")
    wanted = embedder.encode(TEXTS, ["the place", "the colour", "the place"])
    pairs = list(zip(TEXTS, ["the place", "the colour", "the place"], strict=True))
    np.testing.assert_allclose(model.encode(pairs), wanted, atol=1e-6)
    np.testing.assert_allclose(model.encode(TEXTS, condition="the place")[0], wanted[0], atol=1e-6)
    place = llmcond.Condition("the place", ["park", "beach"])
    wanted_there = embedder.encode(TEXTS, place)
    np.testing.assert_allclose(model.encode(TEXTS, condition=place), wanted_there, atol=1e-6)
    assert np.abs(wanted_there[0] - wanted[0]).max() > 1e-3
    # As sentence-transformers itself writes and loads modules of other packages.
    from sentence_transformers import SentenceTransformer

    model.save_pretrained(str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True)
    np.testing.assert_allclose(again.encode(pairs), wanted, atol=1e-6)
    for record in (tmp_path / "again" / "run").rglob("*.json"):
        assert str(fitted.parents[1]) not in record.read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no condition for"),
        ({"condition": ["a", "b", "c"]}, "condition is a list"),
        ({"prompt": "a", "condition": "b"}, "takes no prompt"),
    ],
)
def test_calls_that_are_wrong(fitted, given, message):
    model = llmcond.load_sentence_transformer(fitted)
    with pytest.raises(llmcond.UserError, match=message):
        model.encode(TEXTS, **given)


@pytest.mark.parametrize(
    ("head", "conditions", "why"),
    [
        ("towers", 1, "reads each text with 2 prompts"),
        ("pair", 1, "reads a pair of texts"),
        ("two", 1, "does not consist of dense layers"),
        ("linear", 2, "Export each condition separately, or leave out --condition"),
    ],
)
def test_what_has_no_plain_form_is_refused(fitted, tmp_path, capsys, head, conditions, why):
    out = tmp_path / "out"
    own = [word for one in CONDITIONS[:conditions] for word in ("--condition", one)]
    told = refused(capsys, "export", "--run", fitted, "--head", head, "--out", out, *own)
    assert why in told
    assert "any condition, but needs llmcond" in told
    assert not out.exists()


def test_wrong_input_of_the_command(fitted, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    command = ["export", "--run", fitted, "--head", "linear", "--condition"]
    assert "already exists" in refused(capsys, *command, "c", "--out", tmp_path)
    assert "already exists" in refused(capsys, *command, "c", "--out", tmp_path / "file")
    assert "--condition is empty" in refused(capsys, *command, " ", "--out", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_export_that_differs_is_not_kept(fitted, tmp_path, monkeypatch):
    def wrong(*arguments):
        made, tokenizer = to_modules(*arguments)
        layers = {
            one: [own[0]._replace(weight=own[0].weight * -1), *own[1:]]
            for one, own in made.layers.items()
        }
        return exporting.ModularEmbedder(made.affixes, layers), tokenizer

    monkeypatch.setattr(exporting, "to_modules", wrong)
    with pytest.raises(llmcond.LlmcondError, match="other vectors than llmcond under 'the place'"):
        export(fitted, tmp_path / "out", "hypernet", "the place")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_what_was_written(fitted, tmp_path, capsys):
    found = ok(capsys, "export", "--run", fitted, "--head", "relu", "--out", tmp_path / "a",
               "--condition", "the place")  # fmt: skip
    assert found["chosen_by"] == "fixed"
    assert found["difference"] < 1e-5
