"""Exports give llmcond's vectors in sentence-transformers, and plain ones also without llmcond."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import checkpoints
from helpers.commands import run_json, run_rejected

import llmcond
from llmcond.base.package import DEFAULT_MODEL
from llmcond.integrations import export as exporting
from llmcond.integrations.export import to_modules

TEXTS = ["Two women read at the beach.", "three dogs play in the park", "rain " * 90]
#: The second is not a valid name of a torch module.
CONDITIONS = ["the place", "the number of `people`, e.g. 2.5", "type"]
#: Recipe, prompt and settings of each head. If it has a plain export, the number of conditions in
#: it and the argument that selects a condition.
HEADS = {
    "linear": ("linear", "concat-sent-cond", {}, 1, "fixed"),
    "mlp": ("mlp", "concat-cond-sent", {"hidden": "12"}, 1, "fixed"),
    "hypernet": ("hypernet", "separate", {"rank": "3"}, 3, "task"),
    "relu": ("hypernet", "separate", {"rank": "3", "activation": "relu"}, 1, "fixed"),
    "concat": ("concat", "separate", {}, 2, "task"),
    "hadamard": ("hadamard", "separate", {}, 1, "fixed"),
    "plain": ("linear", "concat-cond-sent", {}, 2, "prompt_name"),
    "towers": ("towers", "separate+concat-sent-cond", {"rank": "3"}),
    "two": ("linear", "concat-sent-cond", {"members": "2"}),
}
PLAIN = {"none": (1, "fixed"), **{name: row[3:] for name, row in HEADS.items() if row[3:]}}
ENCODE_WITHOUT_LLMCOND = """
import json, sys
sys.modules["llmcond"] = None  # makes its import fail
import numpy as np
from sentence_transformers import SentenceTransformer
for out, calls, texts in json.loads(sys.argv[1]):
    model = SentenceTransformer(out, device="cpu")
    vectors = [model.encode(texts, **call) for call in calls]
    if "prompt_name" in calls[0]:
        assert np.allclose(model.encode_query(texts), vectors[0], atol=1e-5)
    np.save(out + "/vectors.npy", vectors)
"""
OPTIONS = {"dtype": "float32", "device": "cpu"}

pytestmark = pytest.mark.filterwarnings("ignore:. of . inputs are longer:UserWarning")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, tiny_bert, small_rows):
    """A run with each of the heads."""
    folder = tmp_path_factory.mktemp("exports")
    lines = ["sentence1,sentence2,condition,label", *(",".join(map(str, r)) for r in small_rows)]
    data, run = folder / "rows.csv", folder / "run"
    data.write_text("\n".join(lines) + "\n")
    prompts = ["separate", "concat-sent-cond", "concat-cond-sent"]
    options = {"pooling": "mean", "normalize": True, **OPTIONS}
    llmcond.extract(model=str(tiny_bert), run=run, data=str(data), prompt=prompts, **options)
    for name, (recipe, prompt, settings, *_) in HEADS.items():
        llmcond.fit_head(
            run=run,
            head=recipe,
            dim=None if recipe == "hadamard" else 16,
            prompt=prompt,
            name=name,
            set={"epochs": "1", **settings},
            subtract=False if name == "plain" else None,
        )
    return run


def export(fitted, out, head, *conditions, **options):
    return llmcond.export(run=fitted, out=out, head=head, condition=conditions, **options)


@pytest.fixture(scope="module")
def exported(fitted, tmp_path_factory):
    """Every plain export, with the vectors of sentence-transformers without llmcond."""
    folder, results, jobs = tmp_path_factory.mktemp("plain"), {}, []
    for head, (count, selector) in PLAIN.items():
        prompt, conditions = "concat-sent-cond" if head == "none" else None, CONDITIONS[:count]
        results[head] = export(fitted, folder / head, head, *conditions, prompt=prompt)
        calls = [{} if selector == "fixed" else {selector: condition} for condition in conditions]
        jobs.append((str(folder / head), calls, TEXTS))
    subprocess.run([sys.executable, "-c", ENCODE_WITHOUT_LLMCOND, json.dumps(jobs)], check=True)
    return results


@pytest.mark.parametrize("head", PLAIN)
def test_plain_exports_work_without_llmcond(exported, fitted, head):
    result, (count, selector) = exported[head], PLAIN[head]
    assert result.chosen_by == selector
    assert result.difference < 1e-5
    prompt = "concat-sent-cond" if head == "none" else None
    embedder = llmcond.load_embedder(fitted, head, prompt=prompt)
    all_vectors = np.load(result.out / "vectors.npy")
    for condition, vectors in zip(CONDITIONS[:count], all_vectors, strict=True):
        np.testing.assert_allclose(vectors, embedder.encode(TEXTS, condition), atol=1e-5)
    # Other servers read these files.
    modules = json.loads((result.out / "modules.json").read_text())
    types = [module["type"].removeprefix("sentence_transformers.models.") for module in modules]
    assert types == result.modules
    pooling = json.loads((result.out / "1_Pooling" / "config.json").read_text())
    assert pooling["pooling_mode_mean_tokens"] is True
    assert not [*result.out.rglob("*.bin"), *result.out.rglob("*.py")]


def test_notes_and_card_explain_the_export(exported, fitted):
    notes = " ".join(exported["plain"].notes)
    assert f"encode_query and encode_document use the first condition, `{CONDITIONS[0]}`." in notes
    # Without a bias the length of the encoder's vectors has no effect, so one Normalize is enough.
    assert exported["relu"].modules == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert exported["relu"].notes == []
    assert "text-embeddings-inference leaves" in " ".join(exported["linear"].notes)
    card = (exported["hypernet"].out / "README.md").read_text()
    assert "task='the place'" in card
    (command,) = re.findall(r"^```bash\n(.*)\n```$", card, re.MULTILINE)
    arguments = shlex.split(command)
    assert arguments[arguments.index("--run") + 1] == fitted.name
    words = [("--condition", condition) for condition in CONDITIONS]
    assert arguments[-6:] == [word for pair in words for word in pair]
    assert str(fitted.parents[1]) not in card


@pytest.mark.slow
def test_card_of_bundled_model_names_it_as_model(tmp_path):
    # In another process: a library gives the main thread a signal stack that is too small here, so
    # that an interrupt in a later test would end the process.
    command = [sys.executable, "-m", "llmcond", "export", "--out", str(tmp_path / "any")]
    subprocess.run(command, check=True, capture_output=True)
    card = (tmp_path / "any" / "README.md").read_text()
    assert f" --model {DEFAULT_MODEL} --head " in card
    assert "--run" not in card
    assert "license: apache-2.0" in card
    for name in ("LivNLP/C-STS-Reannotated", "Verena Rieser", "CC BY 4.0", "CC BY 3.0", "FewRel"):
        assert name in card
    assert (tmp_path / "any" / "run" / "credits.json").is_file()
    exports = ("--model", "minilm", "--head", "none@concat-sent-cond+c", "--out")
    subprocess.run([*command[:4], *exports, str(tmp_path / "frozen")], check=True)
    card = (tmp_path / "frozen" / "README.md").read_text()
    assert " --model minilm --head none@concat-sent-cond+c" in card
    loaded = llmcond.load_sentence_transformer(tmp_path / "frozen")
    expected = llmcond.load_embedder("minilm", exports[3]).encode(TEXTS, "the place")
    np.testing.assert_allclose(loaded.encode(TEXTS, condition="the place"), expected, atol=1e-5)


def test_decoder_with_instruction_is_exported(tmp_path, write_rows, small_rows):
    # The condition follows the sentence, and the instruction precedes it.
    model = str(checkpoints.build_checkpoint("qwen", tmp_path / "tiny").folder)
    options = {"like": "Qwen/Qwen3-Embedding-0.6B", "prompt": ["cond"], **OPTIONS}
    data, run = str(write_rows(small_rows)), tmp_path / "run"
    llmcond.extract(model=model, run=run, data=data, **options)
    result = export(run, tmp_path / "out", "none", "the place")
    assert result.difference < 1e-5
    config = json.loads((result.out / "config_sentence_transformers.json").read_text())
    assert config["default_prompt_name"] == "default"
    assert len({config["prompts"][name] for name in ("query", "document", "default")}) == 1


@pytest.mark.weights
def test_condition_after_the_text_is_exported(real_checkpoint, tmp_path):
    # The tokenizer has tokens of several spaces, and the encoder cuts the longest of the texts.
    model = str(real_checkpoint("embeddinggemma-300m"))
    result = llmcond.export(out=tmp_path / "out", model=model, condition=["the place"])
    assert result.difference < 1e-5


def test_export_accepts_any_condition(one_thread, fitted, tmp_path):
    from sentence_transformers import SentenceTransformer

    result = export(fitted, tmp_path / "any", "towers")
    assert (result.chosen_by, result.difference) == ("any", 0)
    moved = shutil.move(tmp_path / "any", tmp_path / "elsewhere")
    model = llmcond.load_sentence_transformer(moved)
    embedder = llmcond.load_embedder(fitted, "towers")
    conditions = ["the place", "the colour", "the place"]
    expected = embedder.encode(TEXTS, conditions)
    pairs = list(zip(TEXTS, conditions, strict=True))
    np.testing.assert_allclose(model.encode(pairs), expected, atol=1e-6)
    # A run is one even if it has the modules of a whole checkpoint that was trained.
    run = tmp_path / "run"
    shutil.copytree(fitted, run)
    (run / "modules.json").write_text("[]")
    of_run = llmcond.load_sentence_transformer(run)
    default = llmcond.load_embedder(fitted)
    np.testing.assert_allclose(
        of_run.encode(TEXTS, condition="the place"), default.encode(TEXTS, "the place"), atol=1e-6
    )
    condition = llmcond.Condition("the place", ["park", "beach"])
    expected_with_values = embedder.encode(TEXTS, condition)
    assert np.abs(expected_with_values[0] - expected[0]).max() > 1e-3
    vectors = model.encode(TEXTS, condition=condition)
    np.testing.assert_allclose(vectors, expected_with_values, atol=1e-6)
    # sentence-transformers itself writes and loads modules of other packages in this way.
    model.save_pretrained(str(tmp_path / "again"))
    reloaded = SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True)
    np.testing.assert_allclose(reloaded.encode(pairs), expected, atol=1e-6)
    for record in (tmp_path / "again" / "run").rglob("*.json"):
        assert str(fitted.parents[1]) not in record.read_text()
    for arguments, message in (
        ({}, "no condition for"),
        ({"prompt": "a", "condition": "b"}, "takes no prompt"),
    ):
        with pytest.raises(llmcond.UserError, match=message):
            model.encode(TEXTS, **arguments)
    with pytest.raises(llmcond.UserError, match="not both"):
        model.encode(pairs, condition="the place")
    with pytest.raises(llmcond.UserError, match="only models on the hub have revisions"):
        llmcond.load_sentence_transformer(moved, revision="v1")
    with pytest.raises(llmcond.UserError, match="Name another folder"):
        model.save_pretrained(str(moved))


def test_heads_without_plain_form_are_rejected(fitted, tmp_path):
    for head, conditions, reason in (
        ("towers", CONDITIONS[:1], "reads each text with 2 prompts"),
        ("two", CONDITIONS[:1], "does not consist of dense layers"),
        ("linear", ["the place | where"], "they read a condition in one wording"),
        ("linear", CONDITIONS[:2], "Export each condition separately, or leave out --condition"),
        ("plain", ["the place", "document"], "has a prompt 'document' for another purpose"),
    ):
        with pytest.raises(llmcond.UserError, match=rf"{reason}.*any condition, but needs llmcond"):
            export(fitted, tmp_path / "out", head, *conditions)
    assert not (tmp_path / "out").exists()


def test_command_prints_summary_and_rejects_existing_folder(fitted, tmp_path, capsys):
    command = ["export", "--run", fitted, "--head", "relu", "--condition", "the place", "--out"]
    summary = run_json(capsys, *command, tmp_path / "new")
    assert summary["chosen_by"] == "fixed"
    assert summary["difference"] < 1e-5
    assert "already exists" in run_rejected(capsys, *command, tmp_path / "new")


def test_export_with_wrong_vectors_is_deleted(fitted, tmp_path, monkeypatch):
    def negate_first_layers(*arguments):
        modular, tokenizer = to_modules(*arguments)
        layers = {
            condition: [first._replace(weight=-first.weight), *others]
            for condition, (first, *others) in modular.layers.items()
        }
        return exporting.ModularEmbedder(modular.affixes, layers), tokenizer

    monkeypatch.setattr(exporting, "to_modules", negate_first_layers)
    with pytest.raises(llmcond.LlmcondError, match="other vectors than llmcond under 'the place'"):
        export(fitted, tmp_path / "out", "hypernet", "the place")
    assert list(tmp_path.iterdir()) == []
