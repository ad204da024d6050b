"""Commands in README.md and docs/ are ones that the command line takes."""

import re
import shlex
import tomllib

import pytest
import yaml
from helpers.paths import ROOT

from llmcond.cli import _parser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text):
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(llmcond [^#&;|>]*)", line)
            if found and "..." not in found[1] and "$" not in found[1]:
                yield shlex.split(found[1])[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_parsed(page):
    for arguments in commands(page.read_text(encoding="utf-8")):
        _parser().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_of_a_page_is_yaml(page):
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert isinstance(yaml.safe_load(block), dict)


def test_there_are_commands():
    assert sum(len(list(commands(page.read_text(encoding="utf-8")))) for page in PAGES) > 40


def test_extras_that_messages_name_are_told_in_the_readme():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = " ".join(path.read_text() for path in (ROOT / "llmcond").rglob("*.py"))
    named = set(re.findall(r"install_command\('(\w+)'\)|needs the extra (\w+)", sources))
    named = {"".join(pair) for pair in named} | set(extras) - {"dev"}
    assert named <= set(extras)
    told = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in told or f"[{name}]" in told for name in named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_extras_are_installed_in_one_way(page):
    """The package is on no index: what a page installs of it comes from a clone."""
    assert "llmcond[" not in page.read_text(encoding="utf-8")
