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
from llmcond import extract, fit_head
from llmcond.bundled import DEFAULT_MODEL
from llmcond.encoders import EncoderOptions
from llmcond.exporting import export as exporting
from llmcond.exporting.export import to_modules

TEXTS = ["Two women read at the beach.", "three dogs play in the park", "rain " * 90]
#: The second is not a valid name of a torch module.
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
    run_folder = folder / "run"
    extract(
        model=str(tiny_checkpoint()),
        **vars(options),
        run=run_folder,
        data=str(folder / "rows.csv"),
        prompt=prompts,
    )
    for name, (recipe, prompt, head_settings) in HEADS.items():
        changes = {"epochs": "1", **head_settings}
        subtract = False if name == "plain" else None
        dim = None if recipe == "hadamard" else 16
        fit_head(
            run=run_folder,
            head=recipe,
            dim=dim,
            prompt=prompt,
            name=name,
            set=changes,
            subtract=subtract,
        )
    return run_folder


def export(fitted, out, head, *conditions, **options):
    return llmcond.export(run=fitted, out=out, head=head, condition=conditions, **options)


#: For each head, the number of conditions and the argument that selects the condition.
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
_ENCODE_WITHOUT_LLMCOND = """
import json, sys
sys.modules["llmcond"] = None  # makes its import fail
import numpy as np
from sentence_transformers import SentenceTransformer
for out, calls, texts in json.loads(sys.argv[1]):
    model = SentenceTransformer(out, device="cpu")
    np.save(out + "/got.npy", [model.encode(texts, **call) for call in calls])
"""


@pytest.fixture(scope="module")
def exported(fitted, tmp_path_factory):
    """Every plain export, with the vectors of sentence-transformers without llmcond."""
    folder, results, jobs = tmp_path_factory.mktemp("plain"), {}, []
    for head, (count, selector) in PLAIN.items():
        prompt = "concat-sent-cond" if head == "none" else None
        results[head] = export(fitted, folder / head, head, *CONDITIONS[:count], prompt=prompt)
        calls = [
            {} if selector == "fixed" else {selector: condition} for condition in CONDITIONS[:count]
        ]
        jobs.append((str(folder / head), calls, TEXTS))
    subprocess.run([sys.executable, "-c", _ENCODE_WITHOUT_LLMCOND, json.dumps(jobs)], check=True)
    return results


@pytest.mark.parametrize("head", PLAIN)
def test_plain_exports_work_without_llmcond(exported, fitted, head):
    result, (count, selector) = exported[head], PLAIN[head]
    assert result.chosen_by == selector
    assert result.difference < 1e-5
    prompt = "concat-sent-cond" if head == "none" else None
    embedder = llmcond.load_embedder(fitted, head, prompt=prompt)
    for condition, vectors in zip(CONDITIONS[:count], np.load(result.out / "got.npy"), strict=True):
        np.testing.assert_allclose(vectors, embedder.encode(TEXTS, condition), atol=1e-5)


def test_first_condition_is_default(exported, fitted):
    from sentence_transformers import SentenceTransformer

    result = exported["plain"]
    assert "encode_query and encode_document use the first" in " ".join(result.notes)
    model = SentenceTransformer(str(result.out), device="cpu")
    expected = llmcond.load_embedder(fitted, "plain").encode(TEXTS, CONDITIONS[0])
    for encode in (model.encode, model.encode_query, model.encode_document):
        np.testing.assert_allclose(encode(TEXTS), expected, atol=1e-5)


def test_exports_have_files_that_other_servers_read(exported):
    for result in exported.values():
        modules = json.loads((result.out / "modules.json").read_text())
        assert [module["type"] for module in modules] == [
            f"sentence_transformers.models.{kind}" for kind in result.modules
        ]
        pooling = json.loads((result.out / "1_Pooling" / "config.json").read_text())
        assert pooling["pooling_mode_mean_tokens"] is True
        assert not [*result.out.rglob("*.bin"), *result.out.rglob("*.py")]


def test_notes_warn_of_servers_that_skip_modules(exported):
    # Without a bias the length of the encoder's vectors has no effect, so one Normalize is enough.
    assert exported["relu"].modules == ["Transformer", "Pooling", "Dense", "Normalize"]
    assert exported["relu"].notes == []
    assert exported["linear"].modules.count("Normalize") == 2
    assert "text-embeddings-inference leaves" in " ".join(exported["linear"].notes)
    assert "vLLM" in " ".join(exported["hypernet"].notes)


def test_card_has_export_command_without_local_folders(exported, fitted):
    card = (exported["hypernet"].out / "README.md").read_text()
    assert "task='the place'" in card
    (command,) = re.findall(r"^```bash\n(.*)\n```$", card, re.MULTILINE)
    arguments = shlex.split(command)
    assert arguments[:4] == ["llmcond", "export", "--format", "sentence-transformers"]
    assert arguments[arguments.index("--run") + 1] == fitted.name
    assert arguments[-6:] == [
        argument for condition in CONDITIONS for argument in ("--condition", condition)
    ]
    assert str(fitted.parents[1]) not in card


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


def test_decoder_with_instruction_is_exported(tmp_path, write_rows, small_rows):
    # The condition follows the sentence, and the instruction precedes it.
    tiny_bert = checkpoints.build_checkpoint("qwen", tmp_path / "tiny")
    options = EncoderOptions(dtype="float32", device="cpu", like="Qwen/Qwen3-Embedding-0.6B")
    data = str(write_rows(small_rows))
    extract(
        model=str(tiny_bert.folder),
        **vars(options),
        run=tmp_path / "run",
        data=data,
        prompt=["cond"],
    )
    result = export(tmp_path / "run", tmp_path / "out", "none", "the place")
    assert result.difference < 1e-5
    config = json.loads((result.out / "config_sentence_transformers.json").read_text())
    assert config["default_prompt_name"] == "default"
    assert (
        config["prompts"]["query"]
        == config["prompts"]["document"]
        == config["prompts"]["default"]
        != ""
    )
    assert "config_sentence_transformers.json must be given" in " ".join(result.notes)


def test_export_accepts_any_condition(one_thread, fitted, tmp_path):
    result = export(fitted, tmp_path / "any", "towers")
    assert (result.chosen_by, result.difference) == ("any", 0)
    moved = shutil.move(tmp_path / "any", tmp_path / "elsewhere")
    model = llmcond.load_sentence_transformer(moved)
    embedder = llmcond.load_embedder(fitted, "towers")
    expected = embedder.encode(TEXTS, ["the place", "the colour", "the place"])
    pairs = list(zip(TEXTS, ["the place", "the colour", "the place"], strict=True))
    np.testing.assert_allclose(model.encode(pairs), expected, atol=1e-6)
    np.testing.assert_allclose(
        model.encode(TEXTS, condition="the place")[0], expected[0], atol=1e-6
    )
    condition = llmcond.Condition("the place", ["park", "beach"])
    expected_with_values = embedder.encode(TEXTS, condition)
    np.testing.assert_allclose(
        model.encode(TEXTS, condition=condition), expected_with_values, atol=1e-6
    )
    assert np.abs(expected_with_values[0] - expected[0]).max() > 1e-3
    # sentence-transformers itself writes and loads modules of other packages in this way.
    from sentence_transformers import SentenceTransformer

    model.save_pretrained(str(tmp_path / "again"))
    reloaded = SentenceTransformer(str(tmp_path / "again"), trust_remote_code=True)
    np.testing.assert_allclose(reloaded.encode(pairs), expected, atol=1e-6)
    for record in (tmp_path / "again" / "run").rglob("*.json"):
        assert str(fitted.parents[1]) not in record.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no condition for"),
        ({"condition": ["a", "b", "c"]}, "condition is a list"),
        ({"prompt": "a", "condition": "b"}, "takes no prompt"),
    ],
)
def test_invalid_encode_calls_are_rejected(fitted, arguments, message):
    model = llmcond.load_sentence_transformer(fitted)
    with pytest.raises(llmcond.UserError, match=message):
        model.encode(TEXTS, **arguments)


@pytest.mark.parametrize(
    ("head", "conditions", "reason"),
    [
        ("towers", 1, "reads each text with 2 prompts"),
        ("pair", 1, "reads a pair of texts"),
        ("two", 1, "does not consist of dense layers"),
        ("linear", 2, "Export each condition separately, or leave out --condition"),
    ],
)
def test_heads_without_plain_form_are_rejected(fitted, tmp_path, capsys, head, conditions, reason):
    out = tmp_path / "out"
    options = [word for condition in CONDITIONS[:conditions] for word in ("--condition", condition)]
    message = run_rejected(
        capsys, "export", "--run", fitted, "--head", head, "--out", out, *options
    )
    assert reason in message
    assert "any condition, but needs llmcond" in message
    assert not out.exists()


def test_command_rejects_invalid_input(fitted, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    command = ["export", "--run", fitted, "--head", "linear", "--condition"]
    assert "already exists" in run_rejected(capsys, *command, "c", "--out", tmp_path)
    assert "already exists" in run_rejected(capsys, *command, "c", "--out", tmp_path / "file")
    assert "--condition is empty" in run_rejected(capsys, *command, " ", "--out", tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_export_with_wrong_vectors_is_deleted(fitted, tmp_path, monkeypatch):
    def negate_first_layers(*arguments):
        modular, tokenizer = to_modules(*arguments)
        layers = {
            condition: [
                dense_layers[0]._replace(weight=dense_layers[0].weight * -1),
                *dense_layers[1:],
            ]
            for condition, dense_layers in modular.layers.items()
        }
        return exporting.ModularEmbedder(modular.affixes, layers), tokenizer

    monkeypatch.setattr(exporting, "to_modules", negate_first_layers)
    with pytest.raises(llmcond.LlmcondError, match="other vectors than llmcond under 'the place'"):
        export(fitted, tmp_path / "out", "hypernet", "the place")
    assert list(tmp_path.iterdir()) == []


def test_command_prints_summary_of_export(fitted, tmp_path, capsys):
    summary = run_json(capsys, "export", "--run", fitted, "--head", "relu", "--out", tmp_path / "a",
               "--condition", "the place")  # fmt: skip
    assert summary["chosen_by"] == "fixed"
    assert summary["difference"] < 1e-5
