"""Folders of known encoders, which are recognized, and prompts of sentence-transformers."""

from dataclasses import replace

import pytest
from helpers import adapters, checkpoints
from helpers.checkpoints import change_json, write_json, write_modules

from llmcond.base.errors import UserError
from llmcond.commands.lists import check_model
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.checkpoint_settings import CheckpointSettings
from llmcond.encoders.settings import MODELS, find_model
from llmcond.encoders.spec import POOLINGS
from llmcond.report.tables import _describe_encoder

CPU = EncoderOptions(dtype="float32", device="cpu")
INSTRUCT = "Instruct: {instruction}\nQuery: {text}"
TASK = "task: {instruction} | query: {text}"
QWEN = find_model("Qwen/Qwen3-Embedding-0.6B")
GTE = find_model("Alibaba-NLP/gte-Qwen2-1.5B-instruct")
#: Encoders with the same architecture, sizes and prompts.
MISTRALS = {
    "intfloat/e5-mistral-7b-instruct", "Salesforce/SFR-Embedding-Mistral",
    "Salesforce/SFR-Embedding-2_R", "Linq-AI-Research/Linq-Embed-Mistral",
}  # fmt: skip
#: Prompts, and the format of instructions that they have in common; empty if none is certain.
PROMPTS = [
    ({"a": "Instruct: Find it\nQuery: ", "b": "Instruct: Rate: well\nQuery: ", "d": ""}, INSTRUCT),
    ({"a": "Instruct: Find {it}\nQuery:"}, "Instruct: {instruction}\nQuery:{text}"),
    ({"a": "task: x | query: ", "b": "task: y | query: ", "c": "task: x | text: "}, TASK),
    ({"document": "title: none | text: "}, ""),  # a title is no instruction
    ({"query": "query: ", "passage": "passage: "}, ""),
    ({"query": "Represent this sentence for searching relevant passages: "}, ""),
    ({"query": "Instruct: Find it\nQuery: ", "passage": "Instruct: Find it\nPassage: "}, ""),
    ({"query": "Instruct: Find it\nQuery: now"}, ""),  # does not end in a label
    ({"a": None, "b": 3, "c": ["Instruct: Find it\nQuery: "], "d": " "}, ""),
    (["Instruct: Find it\nQuery: "], ""),
]


@pytest.mark.parametrize(("prompts", "expected"), PROMPTS)
def test_prompts_state_the_instruction_format_if_it_is_certain(tiny_checkpoint, prompts, expected):
    folder = tiny_checkpoint()
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    assert resolve(str(folder), CPU).identity.instruction_format == expected
    stated = replace(CPU, instruction_format="{instruction}, {text}")
    assert resolve(str(folder), stated).identity.instruction_format == "{instruction}, {text}"


def write_like(known, folder, pooling=None, **changes):
    """Write the small files of a known encoder into a folder, with changes of its config."""
    write_modules(folder, "Normalize", pooling=POOLINGS[pooling or known.poolings[0]].module)
    template = known.settings.get("instruction_format", "query: {text}")
    prompt = template.replace("{instruction}", "Find it").replace("{text}", "")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": prompt}})
    # Decoders that code of their repository makes bidirectional.
    code = {"auto_map": {"AutoModel": "modeling.Model"}} if "gte-Qwen2" in known.repo else {}
    write_json(folder / "config.json", {**known.architecture, **code, **changes})
    return folder


def recognized(folder):
    return {known.repo for known in CheckpointSettings(folder).recognize()}


#: Without NV-Embed-v2, which is known by its ``model_type`` alone.
STOCK = [known for known in MODELS if known.architecture["model_type"] != "nvembed"]


@pytest.mark.parametrize("known", STOCK, ids=lambda known: known.repo)
def test_folder_of_a_known_encoder_with_instructions_is_recognized(tmp_path, known):
    expected = MISTRALS if known.repo in MISTRALS else {known.repo}
    has_instructions = "instruction_format" in known.settings
    assert recognized(write_like(known, tmp_path)) == (expected if has_instructions else set())


@pytest.mark.parametrize(
    ("known", "changes", "expected"),
    [
        (QWEN, {"vocab_size": 999}, True),  # tokens were added
        (QWEN, {"pooling": "mean"}, True),
        (QWEN, {"pooling": "cls"}, False),
        (QWEN, {"hidden_size": 512}, False),
        (QWEN, {"is_causal": False}, False),
        (GTE, {"is_causal": False, "auto_map": None}, True),
        # Any Qwen2 of this size that was fine-tuned with the same prompts; it is causal.
        (GTE, {"is_causal": True}, False),
    ],
)
def test_other_encoders_of_the_architecture_are_not_recognized(tmp_path, known, changes, expected):
    assert bool(recognized(write_like(known, tmp_path, **changes))) == expected


def test_recognition_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("llmcond.encoders.checkpoint.Checkpoint.check_weights", lambda *_: None)
    caplog.set_level("INFO")
    for repo, expected in (
        (QWEN.repo, f"used with the settings of {QWEN.repo} (licence: {QWEN.licence})"),
        (min(MISTRALS), "Name it with --like"),
    ):
        folder = write_like(find_model(repo), tmp_path / repo)
        for _ in range(2):
            resolved = resolve(str(folder), CPU, identify=False)
        assert (
            resolved.identity.instruction_format == find_model(repo).settings["instruction_format"]
        )
        (message,) = (line for line in caplog.messages if str(folder) in line)
        assert message.endswith(expected)


def test_prompts_with_the_same_text_are_listed_in_one_line(tiny_checkpoint):
    folder = tiny_checkpoint()
    prompts = {"query": "query: ", "STS": "query: ", "document": "title: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    report, _ = check_model(str(folder), CPU)
    lines = [text for name, text in _describe_encoder(report) if name == "its prompt"]
    assert lines == ["'query: ' (query, STS)", "'title: ' (document)"]


@pytest.mark.usefixtures("native_16_bit")
def test_float16_is_refused_by_architecture(tmp_path):
    gemma = checkpoints.build_checkpoint("gemma", tmp_path / "gemma")
    adapters.save_adapter(gemma.network, tmp_path / "adapter", gemma.folder)
    for folder in (gemma.folder, tmp_path / "adapter"):
        for options in ({}, {"quantize": "4bit"}):
            with pytest.raises(
                UserError, match=r"does not work in float16: .* gemma3_text overflow"
            ):
                resolve(str(folder), replace(CPU, dtype="float16", **options))
    change_json(gemma.folder / "config.json", model_type="gemma2")  # a name of the family
    with pytest.raises(UserError, match="architecture gemma2 overflow"):
        resolve(str(gemma.folder), replace(CPU, dtype="float16"), identify=False)
