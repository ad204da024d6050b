"""Modules that embed texts with the bundled model import no torch and no other large library."""

import subprocess
import sys

import pytest

LARGE = ("torch", "transformers", "peft", "lance", "pyarrow", "pandas", "scipy", "sklearn")
#: Modules for search and clustering may import these smaller libraries.
STORAGE = ("lance", "pyarrow", "pandas", "sklearn")

LIGHT_MODULES = """
    llmcond.runs llmcond.runs.cross llmcond.runs.embedder llmcond.runs.embedder
    llmcond.runs.extraction llmcond.runs.familiarity llmcond.runs.open
    llmcond.commands.texts llmcond.commands.texts llmcond.workflows.embed
    llmcond.data.aspects llmcond.data.datasets llmcond.data.guides llmcond.data.readers
    llmcond.data.rows
    llmcond.tasks llmcond.kinds.rated llmcond.kinds.dialogue.task llmcond.kinds.dialogue.data
    llmcond.kinds.ranking.graph llmcond.kinds.ranking.task
    llmcond.evaluation.condition_checks llmcond.evaluation.analyses llmcond.evaluation.paired
    llmcond.evaluation.results
    llmcond.features.extract llmcond.features.view llmcond.metrics llmcond.prompts
    llmcond.heads llmcond.heads.guide llmcond.heads.numpy_heads llmcond.heads.settings
    llmcond.serving.app llmcond.serving.batching llmcond.serving.model llmcond.serving.model_server
    llmcond.serving.server
""".split()
SEARCH_MODULES = """
    llmcond.search llmcond.search.index llmcond.search.model llmcond.search.query
    llmcond.workflows.cluster
""".split()

OPEN_MODEL = """
from llmcond.bundled import DEFAULT_MODEL, bundled_folder
from llmcond.runs.embedder import EmbeddingModel
model = EmbeddingModel.find(bundled_folder("models") / DEFAULT_MODEL)
assert model.head.is_fitted and model.head.head.kind == "none"
assert not EmbeddingModel.find(model.run.folder, "none", "concat-cond-sent").head.is_fitted
"""


def list_loaded(code, libraries):
    """Run code in a new process, and return which of some libraries it has loaded."""
    code += f"\nimport sys\nprint(*[name for name in {libraries!r} if name in sys.modules])"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1].split()


def test_embedding_texts_imports_no_large_library():
    assert list_loaded(f"import {', '.join(LIGHT_MODULES)}", LARGE) == []


def test_search_and_clusters_import_no_torch():
    assert (
        list_loaded(f"import {', '.join(SEARCH_MODULES)}", tuple(set(LARGE) - set(STORAGE))) == []
    )


def test_bundled_model_opens_without_large_libraries():
    assert list_loaded(OPEN_MODEL, LARGE) == []


#: Commands with the libraries that each may import, besides those of the commands before it.
COMMANDS = {
    "similarity 'a man' 'a dog' --condition 'the subject'": (),
    "explain 'a man runs' --condition 'the subject' --out tokens.html": (),
    "embed texts.csv --out v.npy --condition-text 'the place'": ("pandas", "pyarrow", "lance"),
    "check-condition texts.csv --condition 'the place'": (),
    "cluster texts.csv --condition 'the place' --clusters 2 --out g.csv": ("sklearn", "scipy"),
    "index texts.csv --condition 'the place' --out places": (),
    "search places 'a dog' --condition 'the place' -k 2": (),
}


def test_commands_compute_without_torch(tmp_path):
    pytest.importorskip("openvino")
    texts = [f"{who} {where}" for who in ("a man", "a dog") for where in ("at home", "on a hill")]
    (tmp_path / "texts.csv").write_text("\n".join(["text", *texts, *(f"{t} now" for t in texts)]))
    lines = ["import os, shlex, sys", "from llmcond.cli import run", f"os.chdir({str(tmp_path)!r})"]
    forbidden = set(LARGE)
    for line, allowed in COMMANDS.items():
        forbidden -= {*allowed}
        lines += [
            f"assert run(shlex.split({line!r})) == 0",
            f"assert not (used := {forbidden!r} & {{*sys.modules}}), ({line!r}, used)",
        ]
    assert {"torch", "transformers", "peft"}.isdisjoint(list_loaded("\n".join(lines), LARGE))


def test_actor_encodes_without_torch(tmp_path):
    pytest.importorskip("openvino")
    code = f"""
from pathlib import Path
from llmcond.encoders import EncoderOptions, resolve
from llmcond.encoders.spec import EncoderInput
from llmcond.features.extract import EncodingPart
from llmcond.scale.extraction import EncoderSpec, ExtractionWorker
options = EncoderOptions(device="cpu")
fingerprint = resolve("minilm", options).identity.fingerprint
folder = Path({str(tmp_path)!r})
worker = ExtractionWorker(EncoderSpec("minilm", options, fingerprint, folder, "float16"))
stored = worker.work([EncodingPart([EncoderInput("", "a man"), EncoderInput("", "a dog")], {{}})])
assert stored.counts.n_added == 2
"""
    assert {"torch", "transformers", "peft"}.isdisjoint(list_loaded(code, LARGE))


def test_heads_of_rated_pairs_import_no_other_kind():
    from llmcond.heads.recipes import FAMILIES

    names = "recipes fit fitted module settings storage numpy_heads estimator"
    code = "".join(f"import llmcond.heads.{name}\n" for name in names.split())
    others = {module.partition(":")[0] for module in FAMILIES.values() if "kinds" in module}
    assert others
    assert list_loaded(code, sorted(others)) == []


#: Mistakes that are reported before PyTorch is imported, with what the error says.
MISTAKES = {
    "extract --model minilmm": "unknown model 'minilmm'",
    "extract --model minilm --device gpu": "device is 'gpu'",
    "extract --model minilm --device cuda": "device is 'cuda'",
    "extract --model minilm --max-length 600": "max_length is 600; it must be at most 512",
    "extract --model minilm --pooling latent": "pooling is 'latent'",
    "extract --model minilm --like nope": "like is 'nope', not a known model",
    "extract --model minilm --prompt nonsense": "unknown prompt 'nonsense'",
    "extract --model minilm --quantize 4bit": "needs bitsandbytes",
    "extract --model .": ". has no config.json",
    "compare-prompts --model minilmm": "unknown model 'minilmm'",
    "train-lora --model minilmm --head none": "unknown model 'minilmm'",
    "train-lora --model minilm --head none --quantize 4bit": "needs bitsandbytes",
    "train-cross --model minilmm": "unknown model 'minilmm'",
    "sweep-lora --model minilmm --head none": "unknown model 'minilmm'",
    "bench --model minilmm": "unknown model 'minilmm'",
    "bench --device gpu": "device is 'gpu'",
    "models --check minilmm": "unknown model 'minilmm'",
    "models --check minilm --device gpu": "device is 'gpu'",
    "models --check minilm --max-length 600": "max_length is 600; it must be at most 512",
    "models --check ./missing": "unknown model './missing'",
    "prompts show cond --device gpu": "device is 'gpu'",
    "similarity a b --condition c --model minilmm": "there is no run or model minilmm",
    "similarity a b --condition c --device gpu": "device is 'gpu'",
    "embed texts.csv --out v.npy --condition-text c --model minilmm": "there is no run or model",
    "embed texts.csv --out v.npy --condition-text c --device gpu": "device is 'gpu'",
    "index texts.csv --out index --model minilmm": "there is no run or model minilmm",
    "index texts.csv --out index --device gpu": "device is 'gpu'",
    "cluster texts.csv --out g.csv --condition c --device gpu": "device is 'gpu'",
    "serve --model minilmm": "there is no run or model minilmm",
    "serve --device gpu": "device is 'gpu'",
    "explain a --condition c --device gpu": "device is 'gpu'",
    "check-condition texts.csv --condition c --device gpu": "device is 'gpu'",
    "fit-head --head mlp --device gpu": "device is 'gpu'",
    "evaluate --device gpu": "device is 'gpu'",
}


MISTAKES |= {
    f"{command} --run missing": "there is no run at missing"
    for command in (
        "similarity a b --condition c",
        "embed texts.csv --out v.npy --condition-text c",
        "index texts.csv --out index",
        "cluster texts.csv --out g.csv --condition c",
        "serve",
        "explain a --condition c",
        "check-condition texts.csv --condition c",
        "export --out model",
        "fit-head --head mlp",
        "sweep --head mlp --vary dim=2,3",
        "evaluate",
        "analyse",
        "push OWNER/NAME",
        "complete --relation r --head-entity e",
        "reply hello --candidates texts.csv",
        "heads",
    )
}


def test_mistakes_are_reported_before_torch_is_imported(tmp_path):
    (tmp_path / "texts.csv").write_text("text\na man\na dog\n")
    lines = [
        "import contextlib, io, os, shlex, sys",
        "from llmcond import system",
        "from llmcond.cli import run",
        f"os.chdir({str(tmp_path)!r})",
        "system.may_have_gpu = lambda: False",
        # As on a machine without the extra.
        "sys.modules['bitsandbytes'] = None",
        f"for line, message in {MISTAKES!r}.items():",
        "    with contextlib.redirect_stderr(io.StringIO()) as err:",
        "        code = run(shlex.split(line))",
        "    text = err.getvalue()",
        "    assert code == 2 and message in text, (line, code, text)",
        "    assert len(text.splitlines()) == 1, (line, text)",
        "    used = {'torch', 'transformers', 'accelerate'} & {*sys.modules}",
        "    assert not used, (line, used)",
    ]
    assert list_loaded("\n".join(lines), ("torch",)) == []
