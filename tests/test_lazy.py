"""Modules that embed texts with the bundled model import no torch and no other large library."""

import subprocess
import sys

import pytest

LARGE = ("torch", "transformers", "peft", "lance", "pyarrow", "pandas", "scipy", "sklearn")
#: Modules for search and clustering may import these smaller libraries.
STORAGE = ("lance", "pyarrow", "pandas", "sklearn")

LIGHT_MODULES = """
    llmcond.runs.cross llmcond.runs.embedder llmcond.runs.open llmcond.runs.embedder
    llmcond.commands.texts llmcond.workflows.embed llmcond.data.guides llmcond.data.guides
    llmcond.kinds.rated llmcond.kinds.dialogue.task llmcond.kinds.ranking.task
    llmcond.evaluation.analyses llmcond.evaluation.analyses llmcond.evaluation.results
    llmcond.features.extract llmcond.prompts llmcond.heads.guide llmcond.heads.numpy_heads
    llmcond.serving.app llmcond.serving.model_server llmcond.serving.server
""".split()
SEARCH_MODULES = "llmcond.search.index llmcond.search.query llmcond.workflows.cluster".split()

OPEN_MODEL = """
from llmcond.base.package import DEFAULT_MODEL, bundled_folder
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


def test_modules_import_no_large_library():
    assert list_loaded(f"import {', '.join(LIGHT_MODULES)}\n{OPEN_MODEL}", LARGE) == []
    without_storage = tuple(set(LARGE) - set(STORAGE))
    assert list_loaded(f"import {', '.join(SEARCH_MODULES)}", without_storage) == []
    code = "from llmcond.cli import run\ntry: run(['extract', '--help'])\nexcept SystemExit: pass"
    assert list_loaded(code, (*LARGE, "numpy", "rich")) == []


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


@pytest.mark.slow
def test_commands_compute_without_torch(tmp_path):
    pytest.importorskip("openvino")
    texts = [f"{who} {where}" for who in ("a man", "a dog") for where in ("at home", "on a hill")]
    (tmp_path / "texts.csv").write_text("\n".join(["text", *texts, *(f"{t} now" for t in texts)]))
    lines = ["import os, shlex, sys", "from llmcond.cli import run", f"os.chdir({str(tmp_path)!r})"]
    forbidden = {*LARGE, "pydantic"}
    for line, allowed in COMMANDS.items():
        forbidden -= {*allowed}
        lines += [
            f"assert run(shlex.split({line!r})) == 0",
            f"assert not (used := {forbidden!r} & {{*sys.modules}}), ({line!r}, used)",
        ]
    assert {"torch", "transformers", "peft"}.isdisjoint(list_loaded("\n".join(lines), LARGE))


#: Mistakes that are reported before PyTorch is imported, with what the error says.
MISTAKES = {
    "extract --model minilmm": "unknown model 'minilmm'",
    "extract --model minilm --device gpu": "device is 'gpu'",
    "extract --model minilm --prompt nonsense": "unknown prompt 'nonsense'",
    "extract --model minilm --quantize 4bit": "needs bitsandbytes",
    "extract --model minilm --data no.csv": "no.csv does not exist. Expected a .csv",
    "extract --model .": ". has no config.json",
    "sweep-lora --model minilmm --head none": "unknown model 'minilmm'",
    "models --check ./missing": "unknown model './missing'",
    "similarity a b --condition c --model minilmm": "there is no run or model minilmm",
    "index texts.csv --out index --device gpu": "device is 'gpu'",
    "embed texts.csv --out v.npy --condition-text c --run missing": "there is no run at missing",
    "fit-head --head mlp --run missing": "there is no run at missing",
    "reply hello --candidates texts.csv --run missing": "there is no run at missing",
}


def test_mistakes_are_reported_before_torch_is_imported(tmp_path):
    (tmp_path / "texts.csv").write_text("text\na man\na dog\n")
    lines = [
        "import contextlib, io, os, shlex, sys",
        "from llmcond.base import system",
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
