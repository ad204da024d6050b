"""Count wording in code and pages that is hard to read, and check that it does not increase.

    python scripts/prose.py                       # print every count and its limit
    python scripts/prose.py --list words          # print every place that a count includes
    python scripts/prose.py --check               # exit with 1 if a count exceeds its limit

`scripts/test` runs the check. The limits only ever go down: lower them when you improve the text.
An existing prose linter would be preferable, but Vale's package downloads a program when it first
runs, and proselint cannot read Python or take a vocabulary of its own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
#: A place in a file, and what is there.
Finding = tuple[str, str]
Reader = Callable[[str], Iterator[tuple[str, int, str]]]
PAGES: Final = ("README.md", "CHANGELOG.md", "docs/**/*.md", "models/**/README.md")
TUTORIALS: Final = "docs/tutorials/*.py"

#: The largest number that `--check` accepts, by count.
LIMITS: Final = {
    "words": 146,
    "names": 7,
    "test names": 11,
    "help": 0,
    "roles": 0,
    "see": 0,
    "classes": 2,
    "sentences": 0,
    "paragraphs": 0,
}
MEANING: Final = {
    "words": "listed words in docstrings, comments, messages and documentation",
    "names": "identifiers of llmcond/ and scripts/ that contain a listed word",
    "test names": "identifiers of tests/ that contain a listed word",
    "help": "help texts that begin with a preposition",
    "roles": "Sphinx roles, which the documentation generator does not read",
    "see": 'docstrings of the form "See X." where `@override` is meant',
    "classes": "classes of llmcond/ that share their name with another one",
    "sentences": "sentences of more than 35 words in the documentation",
    "paragraphs": "paragraphs of more than 5 sentences, and list items of more than 2",
}

#: Words of prose that usually replace a clearer one.
WORDS: Final = re.compile(
    r"\b(told|tell|tells|whence|whoever|kept|made|asked|usual|apart|drawn|beside|as a rule"
    r"|(?<!your )(?<!its )(?<!their )own"
    r"|what it brings|have a say|dies|is let|are let|so many|of before|by itself|by themselves"
    r"|at the same|all else|or else|nothing else|there(?= (?:as|too|already|alone)\b)|here)\b",
    re.IGNORECASE,
)
#: Participles and pronouns that say nothing about the value they name.
NAMES: Final = frozenset(
    "own found given told tell asked kept made chosen usual whence drawn apart beside place places"
    " said wanted".split()
)
PREPOSITIONS: Final = frozenset(
    "of by as at in on from with without to for where beside instead than before after until"
    " within into over under among between per".split()
)
#: What is counted in the prose of code.
PATTERNS: Final = {
    "words": WORDS,
    "roles": re.compile(r":(?:class|func|meth|mod|data|attr|exc|obj):`"),
    "see": re.compile(r"\ASee [:`].*"),
}
SENTENCE_END: Final = re.compile(r"(?<=[.!?])[\"')\]*_]*\s+(?=[\"'(\[*_]*[A-Z0-9`])")


def in_code(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the count, the line and the text of each finding in a Python file."""
    tree = ast.parse(text)
    for name, line in bindings(tree):
        if NAMES & set(name.lower().split("_")):
            yield "names", line, name
    for line, prose in prose_of(text, tree):
        for count, pattern in PATTERNS.items():
            yield from ((count, line, match.group()) for match in pattern.finditer(prose))
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "help":
            help_text = re.sub(r"^(with|without) --[\w-]+( \S+)?: ", "", literal(node.value))
            if help_text.partition(" ")[0].strip(":,").lower() in PREPOSITIONS:
                yield "help", node.value.lineno, help_text
        elif isinstance(node, ast.ClassDef):
            yield "classes", node.lineno, node.name


def in_page(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the count, the line and the text of each finding in a Markdown page."""
    for line, block in blocks(text):
        yield from (("words", line, match.group()) for match in WORDS.finditer(block))
        if block.startswith(("|", "#")):
            continue
        # The bold text at the beginning of a list item is its title, not a sentence.
        sentences = SENTENCE_END.split(re.sub(r"^([-*] )\*\*[^*]+\.\*\*:? ", r"\1", block))
        if len(sentences) > (2 if block.startswith(("- ", "* ")) else 5):
            yield "paragraphs", line, f"{len(sentences)} sentences: {block[:60]}"
        yield from (("sentences", line, s) for s in sentences if len(s.split()) > 35)


def in_tutorial(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the findings in a tutorial, whose text is in comments between its cells of code."""
    in_text, lines = False, []
    for line in text.splitlines():
        if line.startswith("# %%"):
            in_text = line.startswith("# %% [markdown]")
        lines.append(line[2:] if in_text and not line.startswith("# %%") else "")
    return in_page("\n".join(lines))


def measure(root: Path) -> dict[str, list[Finding]]:
    """Return the findings of every count in a checkout.

    Args:
        root: folder that contains `llmcond`, `scripts`, `tests`, `docs` and `README.md`.
    """
    findings: dict[str, list[Finding]] = {name: [] for name in LIMITS}
    # What is counted in each kind of file, and under which name.
    code = {name: name for name in ("words", "names", "help", "roles", "see")}
    sources: list[tuple[str, Reader, dict[str, str]]] = [
        ("llmcond/**/*.py", in_code, {**code, "classes": "classes"}),
        ("scripts/**/*.py", in_code, code),
        ("tests/**/*.py", in_code, {"names": "test names"}),
        *((page, in_page, {name: name for name in LIMITS}) for page in PAGES),
        (TUTORIALS, in_tutorial, {name: name for name in LIMITS}),
    ]
    for pattern, read, counts in sources:
        for path in sorted(root.glob(pattern)):
            if path.name == Path(__file__).name:  # it contains the lists
                continue
            for count, line, text in read(path.read_text(encoding="utf-8")):
                if count in counts:
                    place = f"{path.relative_to(root)}:{line}"
                    findings[counts[count]].append((place, text))
    uses = Counter(name for _, name in findings["classes"])
    findings["classes"] = [finding for finding in findings["classes"] if uses[finding[1]] > 1]
    return findings


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and the line of every definition, parameter and assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def prose_of(text: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment, and of every string that has a space."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def literal(node: ast.expr) -> str:
    """Return the text of a string; what an f-string inserts becomes `{}`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every paragraph, list item, heading and table row."""
    page = re.sub(r"<!--.*?-->", lambda match: "\n" * match.group().count("\n"), page, flags=re.S)
    block: list[str] = []
    start, in_code = 1, False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        starts_block = re.match(r"\s*([-*] |\d+\. |\||#)", line)
        if block and (fence or starts_block or not line.strip()):
            yield start, " ".join(block)
            block = []
        if fence:
            in_code = not in_code
        elif line.strip() and not in_code:
            if not block:
                start = number
            block.append(line.strip())


def main(arguments: list[str] | None = None) -> int:
    """Print the counts; return 1 if `--check` finds one above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to read")
    parser.add_argument("--list", choices=LIMITS, help="count whose findings are printed")
    parser.add_argument("--check", action="store_true", help="fail if a count exceeds its limit")
    options = parser.parse_args(arguments)
    findings = measure(options.root.resolve())
    if options.list:
        for place, text in findings[options.list]:
            print(f"{place}: {text}")
        summary = Counter(text.lower() for _, text in findings[options.list]).most_common(30)
        print(", ".join(f"{text} {n}" for text, n in summary if n > 1), file=sys.stderr)
        return 0
    too_many = False
    for name, meaning in MEANING.items():
        count, limit = len(findings[name]), LIMITS[name]
        exceeded = options.check and count > limit
        too_many |= exceeded
        if exceeded or not options.check:
            print(f"{name}: {count:,}, limit {limit:,} ({meaning})")
            if exceeded:
                print(f"  Run `python scripts/prose.py --list {name}`, and rewrite the new ones.")
    return int(too_many)


if __name__ == "__main__":
    sys.exit(main())
