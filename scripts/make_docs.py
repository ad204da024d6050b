"""Build the documentation site: pages, executed tutorials, and a reference from the code.

    python scripts/make_docs.py                 # writes build/site
    python scripts/make_docs.py --no-tutorials  # leaves the tutorials as they were executed before

The build is strict: an unknown link, a missing anchor, a page outside the navigation, or a failing
cell of a tutorial is an error. Links to files outside docs/ lead to the repository.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from posixpath import normpath
from typing import Any

import yaml
from common import Options
from notebooks import TUTORIALS, TutorialError, execute

import llmcond
from llmcond.cli import _parser
from llmcond.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGES, SITE = ROOT / "docs", ROOT / "build/docs", ROOT / "build/site"
#: Pages of the site that are not in docs/, by their file in the repository.
OUTSIDE = {"CHANGELOG.md": "changelog.md", "models/README.md": "models.md"}
#: The classes that users create or load; the other classes are results.
CLASSES = (
    "Embedder Encoder EncoderInput Condition Index CrossEncoder Completer Candidates DialogueModel "
    "DialogueState PairFeatures Head Task LlmcondError UserError"
).split()


class SiteError(Exception):
    """A page or a link of the site is wrong."""


# -- pages -------------------------------------------------------------------------------------


def copy_pages(repository: str) -> None:
    """Copy docs/ and the pages outside it, with links that are valid in the site."""
    for path in sorted(SOURCE.rglob("*")):
        copy = PAGES / path.relative_to(SOURCE)
        if path.is_dir() or path.suffix in {".py", ".json"}:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(move_links(path, repository), encoding="utf-8")
        else:
            shutil.copy(path, copy)
    for source, page in OUTSIDE.items():
        (PAGES / page).write_text(move_links(ROOT / source, repository, page), encoding="utf-8")


def move_links(path: Path, repository: str, page: str = "") -> str:
    """Return a page's text with links to files that are outside docs/ moved.

    Args:
        path: The file of the page.
        repository: The address of the repository.
        page: The name of the page in the site, if it is not in docs/.
    """
    folder = path.parent.relative_to(ROOT).as_posix()
    depth = "../" * (len(Path(folder).parts) - 1)

    def move(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if "://" in target:
            return match[0]
        # GitHub keeps the hyphens of a heading "cond - c", and the site joins them.
        anchor = "#" + re.sub("-+", "-", anchor) if anchor else ""
        if not target:
            return f"{match[1]}({anchor})"
        file = normpath(f"{folder}/{target}")
        if file in OUTSIDE:
            return f"{match[1]}({depth}{OUTSIDE[file]}{anchor})"
        if file.startswith("docs/tutorials/"):
            target = file.removeprefix("docs/").replace(".py", ".md")
            return f"{match[1]}({depth}{target}{anchor})"
        is_page = file.startswith("docs/") and file.endswith(".md")  # which zensical checks
        if not is_page and not (ROOT / file).exists():
            raise SiteError(f"{path.relative_to(ROOT)} links to {file}, which does not exist.")
        if file.startswith("docs/") and not file.endswith(".json"):
            target = file.removeprefix("docs/") if page else target
            return f"{match[1]}({target}{anchor})"
        kind = "tree" if (ROOT / file).is_dir() else "blob"
        return f"{match[1]}({repository}/{kind}/main/{file}{anchor})"

    return re.sub(r"(\])\(([^()\s]+)\)", move, path.read_text(encoding="utf-8"))


def write_tutorials() -> None:
    """Execute the tutorials, two at a time, and write them as pages and as notebooks."""
    folder = PAGES / "tutorials"
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(TUTORIALS.glob("*.py"))
    with ThreadPoolExecutor(2) as pool:
        for path, page in zip(sources, pool.map(execute, sources, repeat(folder)), strict=True):
            link = f"[Download this notebook]({path.stem}.ipynb){{ .notebook }}"
            title, _, text = page.partition("\n")
            (folder / f"{path.stem}.md").write_text(f"{title}\n\n{link}\n{text}", encoding="utf-8")


# -- reference ---------------------------------------------------------------------------------


def write_reference() -> None:
    """Write the reference of all commands and public names."""
    folder = PAGES / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in dir(llmcond) if not name.startswith("_")]
    functions = [name for name in names if name[0].islower()]
    results = [name for name in names if name[0].isupper() and name not in CLASSES]
    pages = {
        "commands": commands_page(),
        "functions": python_page(
            "Functions",
            "Each command is also a function, and its keyword arguments have the names of the "
            "command's options. The functions `load_...` return objects for your own code.\n\n"
            "Log messages go to the logger `llmcond`. Notebooks and interactive sessions show them "
            'on standard error; in a program, `logging.basicConfig(level="INFO")` shows them.',
            functions,
        ),
        "classes": python_page(
            "Classes",
            "These are the objects that the functions `load_...` return, and those that you create "
            "yourself.",
            list(CLASSES),
        ),
        "results": python_page(
            "Results",
            "Functions return these objects. In a notebook they are shown as tables. "
            "`to_json()` returns what the command prints with `--json`.",
            results,
        ),
    }
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def python_page(title: str, text: str, names: list[str]) -> str:
    """Return a page whose objects mkdocstrings describes."""
    blocks = [f"::: llmcond.{name}" for name in names]
    return "\n\n".join([f"# {title}", text, *blocks]) + "\n"


def commands_page() -> str:
    """Return a page with all commands and their options, read from the argument parsers."""
    parsers = dict(list_parsers(_parser()))
    tables = {
        name: {
            group.title or "": options_table(group._group_actions)
            for group in parser._action_groups
            if group._group_actions
        }
        for name, parser in parsers.items()
    }
    counts = Counter(pair for groups in tables.values() for pair in groups.items())
    shared = {title: table for (title, table), count in counts.items() if count > 1}
    parts = [
        "# Commands",
        "`llmcond COMMAND --help` prints the same texts. Every command is also a "
        "[function](functions.md) in Python.",
        "| Command | Purpose |\n|---|---|\n"
        + "\n".join(
            f"| [`llmcond {name}`](#{anchor(name)}) | {cell(summary(parser))} |"
            for name, parser in parsers.items()
        ),
    ]
    for name, parser in parsers.items():
        example = (parser.epilog or "").removeprefix("Example: ")
        parts += [
            f"## llmcond {name} {{ #{anchor(name)} }}",
            prose(parser.description or ""),
            f"```bash\n{example}\n```" if example else "",
        ]
        for title, table in tables[name].items():
            if title in shared:
                parts.append(f"Also [options of the group “{title}”](#{anchor(title)}).")
            elif title == "options":
                parts.append(table)
            else:
                parts += [f"**{title[0].upper()}{title[1:]}**", table]
    for title, table in shared.items():
        heading = f"## Options: {title} {{ #{anchor(title)} }}"
        parts += [heading, "Several commands have these options.", table]
    return "\n\n".join(filter(None, parts)) + "\n"


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the parser of each command, with its name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                name = child.prog.removeprefix("llmcond ")
                if name in COMMANDS:
                    yield name, child
                yield from list_parsers(child)


def options_table(actions: list[argparse.Action]) -> str:
    """Return a table of options and their help texts."""
    lines = ["| Option | Meaning |", "|---|---|"]
    for action in actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        metavar: Any = action.metavar or ("" if action.nargs == 0 else action.dest)
        if action.choices:
            metavar = "{" + ",".join(map(str, action.choices)) + "}"
        value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
        several = " ..." if action.nargs in ("+", "*") else ""
        flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
        shown = f" `{cell(value)}{several}`" if value else ""
        required = " (required)" if action.required and action.option_strings else ""
        text = cell((action.help or "").replace("%%", "%"))
        lines.append(f"| {flags}{shown} | {text}{required} |")
    return "\n".join(lines)


def summary(parser: argparse.ArgumentParser) -> str:
    """Return the first line of a command's description."""
    return prose((parser.description or "").partition("\n")[0])


def anchor(title: str) -> str:
    """Return the anchor of a command or a group of options."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def prose(text: str) -> str:
    """Return text in which Markdown shows what would be HTML as it is."""
    return re.sub(r"<(?=\w)", "&lt;", text)


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return prose(text).replace("|", "\\|")


# -- build -------------------------------------------------------------------------------------


def check_readme(site_url: str) -> None:
    """Check that the pages of the site that README.md links to exist.

    Raises:
        SiteError: A page does not exist.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^()\s]+)\)", readme):
        page = link.removeprefix(site_url).partition("#")[0]
        if link.startswith(site_url) and not (SITE / page / "index.html").is_file():
            raise SiteError(f"README.md links to {link}, which does not exist.")


def check_navigation(config: dict[str, Any]) -> None:
    """Check that the navigation has all pages.

    Raises:
        SiteError: A page is missing in the navigation.
    """
    listed = set(list_pages(config["nav"]))
    missing = {path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md")} - listed
    if missing:
        raise SiteError(f"mkdocs.yml does not list {', '.join(sorted(missing))}.")


def list_pages(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for child in entry.values() if isinstance(entry, dict) else entry:
            yield from list_pages(child)


def main() -> int:
    """Parse the command line, and build the site."""
    parser = Options(__doc__)
    action = argparse.BooleanOptionalAction
    parser.add_argument(
        "--tutorials", action=action, default=True, help="execute the tutorials (default: yes)"
    )
    options = parser.parse_args()
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    for path in PAGES.glob("*") if PAGES.exists() else ():
        if path.name != "tutorials":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        copy_pages(config["repo_url"])
        if options.tutorials:
            write_tutorials()
        write_reference()
        check_navigation(config)
        zensical = str(Path(sys.executable).with_name("zensical"))
        subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT, check=True)
        check_readme(config["site_url"])
    except (SiteError, TutorialError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
