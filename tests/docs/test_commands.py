"""Commands, YAML blocks and extras in README.md and docs/ are valid."""

import re
import shlex
import tomllib

import pytest
import yaml
from helpers.paths import ROOT

from llmcond.cli import _parser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def find_commands(text):
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"\s*(llmcond [^#&;|>]*)", line)
            if match and "..." not in match[1] and "$" not in match[1]:
                yield shlex.split(match[1])[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_page_are_valid(page):
    for arguments in find_commands(page.read_text(encoding="utf-8")):
        _parser().parse_args(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_blocks_of_page_are_valid(page):
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert isinstance(yaml.safe_load(block), dict)


def test_pages_have_commands():
    assert sum(len(list(find_commands(page.read_text(encoding="utf-8")))) for page in PAGES) > 40


def test_installation_names_all_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    sources = " ".join(path.read_text() for path in (ROOT / "llmcond").rglob("*.py"))
    named = set(re.findall(r"install_command\('(\w+)'\)|needs the extra (\w+)", sources))
    named = {"".join(pair) for pair in named} | set(extras)
    assert named <= set(extras)
    page = (ROOT / "docs" / "install.md").read_text()
    assert all(f"`{name}`" in page or f"[{name}]" in page for name in named)
