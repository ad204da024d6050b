"""Make the tag of a release, or read what belongs to one.

    python scripts/release.py VERSION         # for example 0.2.0: write the version, commit and tag
    python scripts/release.py --check TAG     # exit with 1 unless the tag fits the files
    python scripts/release.py --notes TAG     # print the tag's section of the changelog

The first form needs a clean clone on the branch main, whose CHANGELOG.md has a section
``[VERSION] - unreleased``. Nothing is pushed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from common import Options

ROOT = Path(__file__).resolve().parent.parent
VERSION = ROOT / "llmcond" / "base" / "package.py"
CHANGELOG = ROOT / "CHANGELOG.md"
CITATION = ROOT / "CITATION.cff"


def main() -> None:
    """Run one of the forms."""
    parser = Options(__doc__)
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("version", nargs="?", metavar="VERSION")
    actions.add_argument("--check", metavar="TAG")
    actions.add_argument("--notes", metavar="TAG")
    arguments = parser.parse_args()
    if arguments.version:
        make_tag(arguments.version)
    elif arguments.check:
        check(arguments.check.removeprefix("v"))
    else:
        print(find_section(arguments.notes.removeprefix("v"))[1])


def make_tag(version: str) -> None:
    """Write the version and the date into the files, commit them, and tag the commit."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        sys.exit(f"release.py: the version is {version!r}; expected a form like 0.2.0 or 0.3.0rc1.")
    if git("status", "--porcelain"):
        sys.exit("release.py: the clone has changes. Commit or remove them.")
    if (branch := git("branch", "--show-current")) != "main":
        sys.exit(f"release.py: the branch is {branch!r}; releases come from main.")
    if git("tag", "--list", f"v{version}"):
        sys.exit(f"release.py: the tag v{version} exists. Released versions do not change.")
    date, _ = find_section(version)
    if date != "unreleased":
        sys.exit(f"release.py: CHANGELOG.md has a date for {version} already: {date}.")
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    replace(CHANGELOG, rf"^## \[{re.escape(version)}\] - unreleased$", f"## [{version}] - {today}")
    replace(VERSION, r'^__version__ = ".*"$', f'__version__ = "{version}"')
    replace(CITATION, r"^version: .*$", f"version: {version}")
    check(version)
    git("commit", "--all", "--message", f"Release version {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"llmcond {version}")
    print(f"Tagged v{version}. To publish it: git push origin main v{version}")


def check(version: str) -> None:
    """Exit with a message unless all files have this version, and the changelog has a date."""
    problems = [
        f"{path.name} does not have the version {version}"
        for path, pattern in ((VERSION, f'"{version}"'), (CITATION, f"version: {version}\n"))
        if pattern not in path.read_text(encoding="utf-8")
    ]
    date, notes = find_section(version)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        problems.append(f"CHANGELOG.md has no date for {version}, but {date!r}")
    if not notes:
        problems.append(f"CHANGELOG.md has no text for {version}")
    if problems:
        sys.exit(f"release.py: {'; '.join(problems)}.")


def find_section(version: str) -> tuple[str, str]:
    """Return the date and the text of a version's section of the changelog."""
    text = CHANGELOG.read_text(encoding="utf-8")
    pattern = rf"^## \[{re.escape(version)}\] - (\S+)\n(.*?)(?=^## \[|\Z)"
    match = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    if match is None:
        sys.exit(f"release.py: CHANGELOG.md has no section [{version}].")
    return match[1], match[2].strip()


def replace(path: Path, pattern: str, replacement: str) -> None:
    """Replace the one line of a file that matches a pattern."""
    text, n_lines = re.subn(
        pattern, replacement, path.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    if n_lines != 1:
        sys.exit(f"release.py: {path.name} has {n_lines} lines like {pattern}; expected one.")
    path.write_text(text, encoding="utf-8")


def git(*arguments: str) -> str:
    """Run git in the clone, and return what it printed."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
