"""The modules of the package do not import each other in a circle."""

import ast
from graphlib import TopologicalSorter

from helpers.paths import ROOT


def imported_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_package_has_no_import_cycles():
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "llmcond").rglob("*.py")
    }
    graph = {
        name: {
            imported
            for imported in imported_names(ast.parse(path.read_text(encoding="utf-8")))
            if imported in paths and imported != name and not name.startswith(f"{imported}.")
        }
        for name, path in paths.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(paths) > 100
