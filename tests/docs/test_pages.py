"""Commands, code blocks, pictures and extras in README.md and docs/ are valid, and some run.

The bundled sample is replaced by its first rows, so that fits take a second.
"""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import numpy as np
import pictures
import pytest
import yaml
from helpers.commands import run_json
from helpers.paths import ROOT

import llmcond.data.datasets
from llmcond.base import package as plugins
from llmcond.cli import _parser, run
from llmcond.data.datasets import sample_folder

pytestmark = pytest.mark.usefixtures("one_thread")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def find_blocks(text):
    """Return the language and the text of each code block of a page."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def split_commands(block):
    """Yield the words of each command of a block, without prompts and comments."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            yield words


def run_command(words, capsys):
    assert words[0] == "llmcond"
    code, captured = run(words[1:]), capsys.readouterr()
    assert code == 0, (words, captured.err)
    return captured.out


def find_commands(text):
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"""\s*(llmcond (?:"[^"]*"|'[^']*'|[^#&;|>"'])*)""", line)
            if match and "..." not in match[1] and "$" not in match[1]:
                yield shlex.split(match[1])[1:]


def test_commands_and_yaml_blocks_are_valid():
    n_commands = 0
    for page, text in TEXTS.items():
        for arguments in find_commands(text) if page.parent.name != "tutorials" else ():
            _parser().parse_args(arguments)
            n_commands += 1
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            assert isinstance(yaml.safe_load(block), dict), page
    assert n_commands > 40


def test_installation_names_all_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    sources = " ".join(path.read_text() for path in (ROOT / "llmcond").rglob("*.py"))
    named = set(re.findall(r"install_command\('(\w+)'\)|needs the extra (\w+)", sources))
    assert {"".join(pair) for pair in named} <= extras
    page = TEXTS[ROOT / "docs" / "install.md"]
    assert [name for name in extras if f"`{name}`" not in page and f"[{name}]" not in page] == []


# -- pictures ----------------------------------------------------------------------------------

MARKDOWN = re.compile(r"!\[([^]]*)\]\(([^)\s]+)\)")
HTML = re.compile(r'<img alt="([^"]*)" src="([^"]+)"|<source [^>]*?srcset="([^"]+)"')


def find_images(text):
    """Yield the alternative text and the path of each image; a <source> has no such text."""
    yield from MARKDOWN.findall(text)
    for alternative, path, source in HTML.findall(text):
        yield (None, source) if source else (alternative, path)


def test_images_exist_with_alternative_text_for_both_themes():
    for page, text in TEXTS.items():
        for alternative, path in find_images(text):
            # README.md has absolute addresses, for a package index.
            _, absolute, part = path.partition("/main/docs/")
            file = ROOT / "docs" / part if absolute else page.parent / path.partition("#")[0]
            assert file.is_file(), path
            assert alternative is None or alternative.strip(), path
            if file.parent == pictures.IMAGES and alternative is not None:
                name = file.stem.rpartition("-")[0]
                assert " ".join(alternative.split()) == pictures.alternative_text(name)
        shown = [path for _, path in MARKDOWN.findall(text) if "images/" in path]
        for light, dark in zip(shown[::2], shown[1::2], strict=True):
            assert dark == light.replace("-light.", "-dark.").replace("-light-", "-dark-"), page
    files = {pictures.picture_path(name, t) for name in pictures.NAMES for t in pictures.THEMES}
    assert set(pictures.IMAGES.iterdir()) == files


# -- pages that run ----------------------------------------------------------------------------


@pytest.fixture
def user_files(in_tmp, monkeypatch):
    """Write every sixth row of the table in the README, and rows of the bundled sample."""
    sample = Path("sample")
    sample.mkdir()
    for name, n_rows in {"train": 24, "dev": 16, "test": 16}.items():
        lines = (sample_folder() / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        (sample / f"{name}.csv").write_text("\n".join(lines[: 1 + n_rows]), encoding="utf-8")
    monkeypatch.setattr(llmcond.data.datasets, "sample_folder", sample.absolute)
    Path("docs").mkdir()
    lines = (ROOT / "docs" / "tickets.csv").read_text(encoding="utf-8").splitlines()
    Path("docs/tickets.csv").write_text("\n".join(lines[::6]), encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/install.md"])
def test_blocks_of_first_pages_run(page, user_files, capsys):
    n_run = 0
    for language, block in find_blocks(TEXTS[ROOT / page]):
        if language == "python":
            exec(block, {})  # text of the page
            n_run += 1
        for words in split_commands(block) if language == "bash" else ():
            if words[0] == "llmcond":  # the other commands install the package
                run_command(words, capsys)
                n_run += 1
    assert n_run > 0


def test_blocks_of_integrations_run(in_tmp, capsys):
    """Only those run that need no additional library."""
    page = TEXTS[ROOT / "docs" / "integrations.md"]
    blocks = [text for language, text in find_blocks(page) if language == "python"]
    for text in blocks:
        compile(text, "docs/integrations.md", "exec")
    command = re.search(r"^llmcond (export --out places .*)$", page, re.MULTILINE)[1]
    report = run_json(capsys, *shlex.split(command))
    # The export adds the adapter to the weights.
    assert report["difference"] < 1e-5
    (block,) = [text for text in blocks if 'SentenceTransformer("places")' in text]
    namespace = {}
    exec(block, namespace)  # text of the page
    texts = ["Two women read a book at the beach.", "Two women cook at night."]
    expected = llmcond.load_embedder("minilm-conditions").encode(texts, "the place")
    np.testing.assert_allclose(namespace["vectors"], expected, atol=1e-5)
    (block,) = [text for text in blocks if "load_sentence_transformer(" in text]
    exec(block, {})


#: Maps a part of a command line of docs/extending.md to text that its output must contain.
EXPECTED_OUTPUT = {
    "kendall": "kendall",
    "runs/trios --plugin": "2 queries of 2 trios",
    "complete": "cider",
}


@pytest.fixture
def forget_plugins(monkeypatch):
    """A function that forgets all plugins, so that each command must name its own."""

    def forget():
        monkeypatch.setattr(plugins, "_REGISTERED", {})
        for name in [name for name in sys.modules if name.startswith("llmcond_plugin_")]:
            monkeypatch.delitem(sys.modules, name)

    return forget


def test_files_and_commands_of_extending_run(in_tmp, capsys, forget_plugins):
    names = []
    for language, text in find_blocks(TEXTS[ROOT / "docs" / "extending.md"]):
        title = re.match(r"# (\S+\.(?:py|toml|csv))\n", text)
        if title:
            Path(title[1]).write_text(text[title.end() :], encoding="utf-8")
            names.append(title[1])
        elif language == "bash":
            for words in split_commands(text):
                forget_plugins()
                out = run_command(words, capsys)
                for part, expected in EXPECTED_OUTPUT.items():
                    assert part not in " ".join(words) or expected in out
        elif language == "python":
            forget_plugins()
            namespace = {}
            for name in ("my_task.py", "my_heads.py"):
                exec(Path(name).read_text(), namespace)  # text of the page
            exec(text, namespace)
            assert -1 <= namespace["results"][0].metrics["spearman"].value <= 1
    assert len(names) == 11
    ranks = Path("ranks.csv").read_text(encoding="utf-8").splitlines()
    # Three test dishes, each with two columns, both in either direction.
    assert len(ranks) == 1 + 3 * 2 * 2
    assert ranks[1].split(",")[1:5] == ["forward", "chestnut soup", "drink", "cider"]
    for run_folder in ("runs/answers", "runs/largest", "runs/menus", "runs/trios"):
        forget_plugins()
        assert run(["evaluate", "--head", "none", "--run", run_folder]) == 2
        assert "--plugin" in capsys.readouterr().err
