"""The generated parts of the documentation site, and its checks of links and addresses."""

import argparse
import re
import tomllib

import make_docs
import pytest
from helpers.paths import ROOT

import llmcond
from llmcond.cli import _parser


def test_reference_has_every_option_of_every_command():
    page = make_docs.commands_page()
    for name, parser in make_docs.list_parsers(_parser()):
        text = page.partition(f"## llmcond {name} {{")[2].partition("\n## ")[0]
        text += page.partition("\n## Options: ")[2]
        for action in parser._actions:
            if not isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
                for flag in action.option_strings:
                    assert f"`{flag}`" in text, (name, flag)
    assert len(list(make_docs.list_parsers(_parser()))) == len(make_docs.COMMANDS)


def test_reference_has_every_public_name_once(tmp_path, monkeypatch):
    monkeypatch.setattr(make_docs, "PAGES", tmp_path)
    make_docs.write_reference()
    text = "".join(path.read_text() for path in (tmp_path / "reference").glob("*.md"))
    names = re.findall(r"^::: llmcond\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(name for name in llmcond.__all__ if name[0] != "_")


def test_cells_show_help_texts_as_they_are():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratio", metavar="A|B", nargs="+", help="<b> at most 5 %% | none")
    assert "| `--ratio` `A\\|B ...` | &lt;b> at most 5 % \\| none |" in make_docs.options_table(
        parser._actions
    )


def test_links_lead_to_pages_or_to_the_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    for name in ("docs/tutorials/own.py", "models/README.md", "prompts/a.toml", "docs/page.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "[a](other.md#x---y) [b](../models/README.md) [c](../prompts) [d](../prompts/a.toml) "
        "[e](tutorials/own.py) [f](https://x.org/a.py) [g](#here---there)"
    )
    assert make_docs.move_links(page, "https://repo") == (
        "[a](other.md#x-y) [b](models.md) [c](https://repo/tree/main/prompts) "
        "[d](https://repo/blob/main/prompts/a.toml) [e](tutorials/own.md) [f](https://x.org/a.py) "
        "[g](#here-there)"
    )
    page.write_text("[a](../gone.txt)")
    with pytest.raises(make_docs.SiteError, match=r"docs/page\.md links to gone\.txt, which does"):
        make_docs.move_links(page, "https://repo")


def test_broken_links_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(make_docs, "SITE", tmp_path / "site")
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    (tmp_path / "site" / "b").mkdir(parents=True)
    (tmp_path / "site" / "b" / "index.html").write_text('<p id="there">')
    index = tmp_path / "site" / "index.html"
    readme = tmp_path / "README.md"
    readme.write_text("[b](https://site/b/#there) [other](https://elsewhere/c/)")
    index.write_text('<a href="b/#there"></a> <a href="https://elsewhere/"></a>')
    make_docs.check_links("https://site/")
    index.write_text('<a href="b/#nowhere"></a> <img src="gone.png">')
    readme.write_text("[c](https://site/c/)")
    with pytest.raises(make_docs.SiteError) as error:
        make_docs.check_links("https://site/")
    assert str(error.value).splitlines()[1:] == [
        "index.html -> b/#nowhere",
        "index.html -> c/",
        "index.html -> gone.png",
    ]


def test_pages_outside_the_navigation_are_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(make_docs, "PAGES", tmp_path)
    (tmp_path / "a.md").touch()
    (tmp_path / "b.md").touch()
    make_docs.check_navigation({"nav": [{"Start": ["a.md", {"B": "b.md"}]}]})
    with pytest.raises(make_docs.SiteError, match=r"does not list b\.md"):
        make_docs.check_navigation({"nav": [{"Start": ["a.md"]}]})


def test_addresses_agree():
    config = make_docs.read_config()
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Documentation"] == config["site_url"]
    assert urls["Repository"] == config["repo_url"]
    readme = (ROOT / "README.md").read_text()
    owner = config["repo_url"].removeprefix("https://github.com/")
    known = (config["site_url"], config["repo_url"], f"https://raw.githubusercontent.com/{owner}/")
    for url in re.findall(r'(?:\]\(|src(?:set)?=")([^()"\s]+)', readme):
        assert url.startswith((*known, "https://arxiv.org/", "https://github.com/bigai-nlco/")), url


def test_every_file_has_the_addresses_of_pyproject():
    """The addresses are defined in pyproject.toml; a move of the project changes all of them."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    pattern = re.compile(r"https://(?:github\.com/[\w-]+/llmcond\b|[\w-]+\.github\.io/llmcond/)")
    folders = ("docs", "llmcond", "models", "packages", "scripts", ".github")
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    users = {}
    for path in paths:
        if path.suffix in {"", ".cff", ".json", ".md", ".py", ".toml", ".yml"}:
            for url in pattern.findall(path.read_text(encoding="utf-8")):
                users.setdefault(url, []).append(str(path.relative_to(ROOT)))
    assert users.keys() == {urls["Documentation"], urls["Repository"]}, users
