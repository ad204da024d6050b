"""Find scripts that may have changed, so that the tests of all other scripts can be skipped.

Git compares the working tree with the commit twenty commits ago. A script uses its own file, the
scripts and the modules of llmcond that it imports, and everything in ``scripts/`` that is not
Python. Its tests also use ``tests/helpers/`` and ``tests/conftest.py``. Indirect imports are
ignored: only ``--all`` covers their changes.
"""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

N_COMMITS = 20
#: A change to these files may break every script.
PACKAGING = {"pyproject.toml", "constraints.txt"}


@cache
def changed_files(root: Path, n_commits: int = N_COMMITS) -> frozenset[str] | None:
    """Return paths that differ from ``n_commits`` ago; None if git cannot say."""
    if not (root / ".git").exists():
        return None
    commands = (
        ("diff", "--name-only", "--no-renames", "-z", f"HEAD~{n_commits}"),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    )
    try:
        processes = [
            subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True)
            for command in commands
        ]
    except (OSError, subprocess.CalledProcessError):  # no git, or the history is too short
        return None
    return frozenset("".join(process.stdout for process in processes).split("\0")) - {""}


@cache
def used_files(root: Path, script: str) -> frozenset[str]:
    """Return the paths of a script, of scripts it imports, and of modules it imports directly."""
    path = f"scripts/{script}.py"
    files = {path}
    for module in _imported_modules(ast.parse((root / path).read_text(encoding="utf-8"))):
        name = module.replace(".", "/")
        if (root / f"scripts/{name}.py").exists():
            files |= used_files(root, name)
        elif module.partition(".")[0] == "llmcond":
            files |= {f"{name}.py", f"{name}/__init__.py", *_lazy_source(root / f"{name}.py")}
    return frozenset(files)


def _lazy_source(path: Path) -> Iterator[str]:
    """Yield the module that defines a lazily imported name, as the stub of its package says.

    ``path`` is the name written as a module, such as ``llmcond/heads/FittedHead.py``.
    """
    stub = path.with_name("__init__.pyi")
    if stub.exists():
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and path.stem in (name.name for name in node.names):
                yield f"{str(node.module).replace('.', '/')}.py"


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    """Yield names of modules; ``from a import b`` yields ``a.b`` too, which may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_have_changed(root: Path, scripts: tuple[str, ...], test: str) -> bool:
    """Return whether scripts, the files that they use, or their test file may have changed.

    Args:
        root: root of the repository.
        scripts: names of the scripts, without ``.py``.
        test: path of the test file, relative to the root.
    """
    changed = changed_files(root)
    if changed is None:
        return True
    used = {test, *PACKAGING}.union(*(used_files(root, script) for script in scripts))
    shared = any(
        path.startswith(("tests/helpers/", "tests/conftest"))
        or (path.startswith("scripts/") and not path.endswith(".py"))
        for path in changed
    )
    return shared or not changed.isdisjoint(used)
