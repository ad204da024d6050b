"""Find scripts that may have changed, so that tests of all other scripts can be left out.

Git compares the working tree with the commit twenty commits ago. A script uses its own file, the
scripts and the modules of llmcond that it imports, and everything in ``scripts/`` that is not
Python. Its tests also use ``tests/helpers/`` and ``tests/conftest.py``. What the modules import in
turn is not looked at: such a change is found by ``--all``.
"""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

N_COMMITS = 20
#: A change of these may break every script.
PACKAGING = {"pyproject.toml", "constraints.txt"}


@cache
def changed_files(root: Path, n_commits: int = N_COMMITS) -> frozenset[str] | None:
    """Return paths that differ from some commits ago; None where git does not know."""
    if not (root / ".git").exists():
        return None
    commands = (
        ("diff", "--name-only", "--no-renames", "-z", f"HEAD~{n_commits}"),
        ("ls-files", "--others", "--exclude-standard", "-z"),
    )
    try:
        done = [
            subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True)
            for command in commands
        ]
    except (OSError, subprocess.CalledProcessError):  # no git, or too short a history
        return None
    return frozenset("".join(one.stdout for one in done).split("\0")) - {""}


@cache
def used_files(root: Path, script: str) -> frozenset[str]:
    """Return the paths of a script, of scripts it imports, and of modules it imports directly."""
    path = f"scripts/{script}.py"
    files = {path}
    for module in _imported(ast.parse((root / path).read_text(encoding="utf-8"))):
        name = module.replace(".", "/")
        if (root / f"scripts/{name}.py").exists():
            files |= used_files(root, name)
        elif module.partition(".")[0] == "llmcond":
            files |= {f"{name}.py", f"{name}/__init__.py", *_home(root / f"{name}.py")}
    return frozenset(files)


def _home(path: Path) -> Iterator[str]:
    """Yield the module that a package's stub names for one of its lazy names, if there is a stub.

    ``path`` is what the name would be as a module: ``llmcond/heads/FittedHead.py``.
    """
    stub = path.with_name("__init__.pyi")
    if stub.exists():
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and path.stem in (own.name for own in node.names):
                yield f"{str(node.module).replace('.', '/')}.py"


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield names of modules; of ``from a import b`` also ``a.b``, which may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def may_have_changed(root: Path, scripts: tuple[str, ...], test: str) -> bool:
    """Return whether a script or what it uses differs, or the file of its tests, or nobody knows.

    Args:
        root: the repository.
        scripts: names without ``.py``.
        test: the path of the file of tests, from the root.
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
