"""Figures about the code base: sizes, import cycles, and what it costs to add something.

    python scripts/house.py                        # llmcond/
    python scripts/house.py --against 100d9ab      # before and after, as a Markdown table
    python scripts/house.py --root path/to/package --json

A cycle is a group of modules that import each other, directly or through others. Imports at the
top of a module, inside functions and under TYPE_CHECKING are counted separately. The cost of an
addition is the number of shipped files that mention an existing example of its kind.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

When = Literal["load", "lazy", "typing"]
Graph = dict[str, set[str]]

#: Names that few modules should need to know.
WORDS: Final = ("sentence1", "spearman", "pool_over", "add_argument")
#: Kinds of additions, each with an existing example.
EXAMPLES: Final = {
    "head": "hadamard",
    "metric": "pearson",
    "encoder setting": "pool_over",
    "command": "analyse",
    "command with its own workflow": "push",
    "task": "csts",
    "figure of a ranking": "median_rank",
    "object store": "gs",
    "kind of task": "dialogue",
}
#: Classes of runs, tasks and data whose type reveals the kind of task.
KIND_CLASSES: Final = frozenset(
    "Run RankingRun DialogueRun Task RankingTask Dialogue Dataset Graph Dialogues".split()
)
#: From this number of parameters on, calls of a function are hard to read.
MANY: Final = 8
#: Suffixes of the files that ship.
_TEXT: Final = {".py", ".toml", ".js", ".css", ".j2", ".md", ".json"}


@dataclass(frozen=True, slots=True)
class Function:
    """The location and the length of a function, a method or a file.

    Attributes:
        place: dotted name of a function or method, or path of a file.
        lines: number of lines.
    """

    place: str
    lines: int


@dataclass(frozen=True, slots=True)
class House:
    """The figures of one version of a package.

    Attributes:
        files: number of Python modules.
        lines: number of their lines, including blank lines and comments.
        largest_file: name and lines of the longest module.
        largest_function: name and lines of the longest function.
        function_median: median length of a function in lines.
        function_p90: length that 90 % of the functions do not exceed.
        many_parameters: functions with ``MANY`` or more parameters, not counting ``self``.
        declared_twice: parameters of workflows that repeat the name and default of an option.
        cycles_load: import cycles by imports at the top of modules.
        cycles_lazy: import cycles when imports inside functions count as well.
        cycles_typing: import cycles when imports under TYPE_CHECKING count as well.
        mentions: number of modules that mention each word of ``WORDS``.
        costs: shipped files that mention the example of each kind of addition.
        kind_checks: ``isinstance`` calls outside ``kinds/`` that ask for the kind of task.
    """

    files: int
    lines: int
    largest_file: Function
    largest_function: Function
    function_median: float
    function_p90: float
    many_parameters: list[str]
    declared_twice: list[str]
    cycles_load: list[list[str]]
    cycles_lazy: list[list[str]]
    cycles_typing: list[list[str]]
    mentions: dict[str, int]
    costs: dict[str, list[str]]
    kind_checks: list[str]


def measure(package: Path) -> House:
    """Return the figures of a package, given its folder.

    Raises:
        SystemExit: the folder contains no Python modules.
    """
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    if not sources:
        raise SystemExit(
            f"house: {package} contains no Python modules. Expected the folder of a package."
        )
    trees = {module_name(path, package): ast.parse(text) for path, text in sources.items()}
    nodes = {name: list(ast.walk(tree)) for name, tree in trees.items()}
    functions = [f for name in trees for f in functions_of(name, nodes[name])]
    lengths = sorted(function.lines for function in functions) or [0]
    files = [
        Function(str(path.relative_to(package.parent)), text.count("\n"))
        for path, text in sources.items()
    ]
    edges = {when: Graph() for when in ("load", "lazy", "typing")}
    for name, tree in trees.items():
        is_package = (package.parent / Path(*name.split("."))).is_dir()
        for when, target in imports_of(name, is_package, tree, trees):
            edges[when].setdefault(name, set()).add(target)
    return House(
        files=len(files),
        lines=sum(file.lines for file in files),
        largest_file=max(files, key=lambda file: file.lines),
        largest_function=max(functions, key=lambda f: f.lines, default=Function("", 0)),
        function_median=statistics.median(lengths),
        function_p90=lengths[min(len(lengths) - 1, int(0.9 * len(lengths)))],
        many_parameters=[
            f"{name}.{node.name}"
            for name in trees
            for node in nodes[name]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and len(parameters_of(node)) >= MANY
        ],
        declared_twice=declared_twice(trees, nodes),
        cycles_load=cycles(edges["load"]),
        cycles_lazy=cycles(edges["load"], edges["lazy"]),
        cycles_typing=cycles(edges["load"], edges["lazy"], edges["typing"]),
        mentions={word: sum(mentions(word, text) for text in sources.values()) for word in WORDS},
        costs={what: files_with(word, package) for what, word in EXAMPLES.items()},
        kind_checks=[
            f"{name}: {ast.unparse(node)}"
            for name in trees
            if not name.startswith(f"{package.name}.kinds.")
            for node in nodes[name]
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) == "isinstance"
            and any(
                isinstance(name_node, ast.Name) and name_node.id in KIND_CLASSES
                for name_node in ast.walk(node.args[1])
            )
        ],
    )


def module_name(path: Path, package: Path) -> str:
    """Return the dotted name of a module; ``__init__.py`` has the name of its package."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions_of(module: str, nodes: Iterable[ast.AST]) -> Iterator[Function]:
    """Yield the functions and methods among the nodes of a module."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            yield Function(f"{module}.{node.name}", end - node.lineno + 1)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str | None]:
    """Return the parameters except ``self`` and ``cls``, each with the source of its default."""
    signature = node.args
    positional = [*signature.posonlyargs, *signature.args]
    defaults: list[ast.expr | None] = [
        *[None] * (len(positional) - len(signature.defaults)),
        *signature.defaults,
    ]
    parameters = [*positional, *signature.kwonlyargs]
    pairs = zip(parameters, [*defaults, *signature.kw_defaults], strict=True)
    return {
        argument.arg: None if default is None else ast.unparse(default)
        for argument, default in pairs
        if argument.arg not in ("self", "cls")
    }


def declared_twice(
    trees: Mapping[str, ast.Module], nodes: Mapping[str, list[ast.AST]]
) -> list[str]:
    """Return the parameters of workflows that repeat the name and default of an option.

    An option is a field of a class whose value is a call of ``option``; the call's first argument
    is the default.
    """
    options = {
        (node.target.id, ast.unparse(node.value.args[0]))
        for nodes_of_module in nodes.values()
        for node in nodes_of_module
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == "option"
        and node.value.args
    }
    return [
        f"{module}.{node.name}: {name}"
        for module, tree in trees.items()
        if ".workflows." in module
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for name, default in parameters_of(node).items()
        if (name, default) in options
    ]


def imports_of(
    module: str, is_package: bool, tree: ast.Module, known: Mapping[str, ast.Module]
) -> Iterator[tuple[When, str]]:
    """Yield the modules of the same package that a module imports, and when it imports them."""
    for when, node in import_nodes(tree, "load"):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                up = module.split(".")
                up = up[: len(up) - node.level + is_package]
                base = ".".join([*up, *([base] if base else [])])
            whole = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in whole]
        yield from ((when, name) for name in names if name in known and name != module)


def import_nodes(node: ast.AST, when: When) -> Iterator[tuple[When, ast.Import | ast.ImportFrom]]:
    """Yield the import statements below a node, and when each of them runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield when, child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from import_nodes(child, "lazy" if when == "load" else when)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from import_nodes(ast.Module(child.body, []), "typing")
            yield from import_nodes(ast.Module(child.orelse, []), when)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from import_nodes(child, when)


def cycles(*graphs: Graph) -> list[list[str]]:
    """Return the groups of modules that reach each other over the edges of all graphs."""
    edges: Graph = {}
    for graph in graphs:
        for name, targets in graph.items():
            edges.setdefault(name, set()).update(targets)
    reached = {name: reachable(name, edges) for name in edges}
    groups = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in reached
        if name in reached[name]
    }
    return sorted(sorted(group) for group in groups)


def reachable(start: str, edges: Graph) -> set[str]:
    """Return the modules that one module imports, directly or through others."""
    reached: set[str] = set()
    pending = [start]
    while pending:
        new = edges.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    return reached


def mentions(word: str, text: str) -> bool:
    """Return whether a text contains a word as a whole word."""
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


def files_with(word: str, package: Path) -> list[str]:
    """Return the files of the package, the prompts and the recipes that mention a word.

    Files below ``kinds/`` are left out, because a kind of task may know its name.
    """
    folders = (package, package.parent / "heads", package.parent / "prompts")
    paths = sorted(p for f in folders for p in f.rglob("*") if p.suffix in _TEXT and p.is_file())
    return [
        str(path.relative_to(package.parent))
        for path in paths
        if package / "kinds" not in path.parents
        and (mentions(word, path.stem) or mentions(word, path.read_text(encoding="utf-8")))
    ]


@contextmanager
def extracted_revision(checkout: Path, revision: str) -> Iterator[Path]:
    """Extract a git revision into a temporary folder; also used by `prose.py`.

    Raises:
        SystemExit: git does not know the revision.
    """
    git = shutil.which("git") or "git"
    command = [git, "-C", str(checkout), "archive", "--format=tar", revision]
    completed = subprocess.run(command, capture_output=True, check=False)
    if completed.returncode:
        raise SystemExit(f"git archive failed: {completed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(completed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def rows(house: House) -> dict[str, str]:
    """Return the printed text of each figure, by name."""
    table = {
        "files": f"{house.files:,}",
        "lines": f"{house.lines:,}",
        "largest file": f"{house.largest_file.lines:,} ({house.largest_file.place})",
        "largest function": f"{house.largest_function.lines} ({house.largest_function.place})",
        "function length, median / p90": f"{house.function_median:g} / {house.function_p90:g}",
    }
    table[f"functions with {MANY} or more parameters"] = str(len(house.many_parameters))
    table["options declared twice"] = str(len(house.declared_twice))
    table["checks for the kind of task outside `kinds/`"] = str(len(house.kind_checks))
    cycle_groups = {
        "import cycles": house.cycles_load,
        "import cycles, lazy imports included": house.cycles_lazy,
        "import cycles, TYPE_CHECKING included": house.cycles_typing,
    }
    for name, groups in cycle_groups.items():
        table[name] = str(len(groups)) + "".join(f" ({', '.join(group)})" for group in groups[:3])
    for word, count in house.mentions.items():
        table[f"modules that mention `{word}`"] = str(count)
    for what, files in house.costs.items():
        table[f"files that know the {what} `{EXAMPLES[what]}`"] = str(len(files))
    return table


def markdown(columns: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    """Yield the lines of a Markdown table with one column per version."""
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for name in next(iter(columns.values())):
        yield f"| {name} | {' | '.join(column[name] for column in columns.values())} |"


def main(arguments: list[str] | None = None) -> int:
    """Measure the package and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    default = Path(__file__).resolve().parent.parent / "llmcond"
    parser.add_argument(
        "--root", type=Path, default=default, help="folder of the package (default: llmcond)"
    )
    parser.add_argument("--against", metavar="REV", help="git revision to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    package = options.root.resolve()
    houses = {"now": measure(package)}
    if options.against:
        with extracted_revision(package.parent, options.against) as folder:
            houses = {options.against: measure(folder / package.name), **houses}
    if options.json:
        print(json.dumps({name: asdict(house) for name, house in houses.items()}))
    elif options.against:
        print("\n".join(markdown({name: rows(house) for name, house in houses.items()})))
    else:
        for name, value in rows(houses["now"]).items():
            print(f"{name:45} {value}")
        print("\nCost of an addition: shipped files that mention an existing example")
        for what, files in houses["now"].costs.items():
            print(f"{what} ({EXAMPLES[what]}): {', '.join(files) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
