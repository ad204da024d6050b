"""Tests of a script are skipped only if no file that it uses has changed."""

import subprocess

import pytest

from helpers.changes import N_COMMITS, changed_files, may_have_changed, used_files

TEST = "tests/scripts/test_first.py"
FILES = {
    "scripts/first.py": "import json\nimport second\nfrom llmcond.heads import fit\n",
    "scripts/second.py": "def main():\n    from llmcond import files\n",
    "scripts/third.py": "import llmcond.metrics\nfrom llmcond import encode\n",
    "llmcond/__init__.pyi": "from llmcond.encoding import encode as encode\n",
    "llmcond/encoding.py": "",
    "llmcond/heads/fit.py": "from llmcond import log\n",
    "llmcond/files.py": "",
    "llmcond/log.py": "",
    TEST: "",
}


@pytest.fixture
def repository(tmp_path):
    """Commit the files, and then as many empty commits as are compared."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    for _ in range(N_COMMITS + 1):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "One")
    return tmp_path


def git(folder, *arguments):
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def test_used_files_include_direct_imports(repository):
    used = used_files(repository, "first")
    assert {"scripts/first.py", "scripts/second.py", "llmcond/heads/fit.py"} < used
    assert {"llmcond/files.py", "llmcond/heads/__init__.py"} < used
    assert used.isdisjoint({"scripts/third.py", "llmcond/log.py", "llmcond/metrics.py"})


def test_clean_checkout_has_no_changed_files(repository):
    assert changed_files(repository) == frozenset()
    assert not may_have_changed(repository, ("first", "third"), TEST)


@pytest.mark.parametrize(
    ("path", "first", "third"),
    [
        ("scripts/second.py", True, False),
        ("llmcond/heads/fit.py", True, False),
        ("llmcond/metrics.py", False, True),
        ("llmcond/encoding.py", False, True),
        ("llmcond/log.py", False, False),
        ("tests/helpers/commands.py", True, True),
        (TEST, True, False),
        ("scripts/aspects/hotels.toml", True, True),
        ("pyproject.toml", True, True),
    ],
)
@pytest.mark.parametrize("committed", [False, True])
def test_changed_file_affects_scripts_that_use_it(repository, path, first, third, committed):
    (repository / path).parent.mkdir(parents=True, exist_ok=True)
    (repository / path).write_text("x = 1\n")
    if committed:
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "--message", "Two")
    assert may_have_changed(repository, ("first",), TEST) is first
    assert may_have_changed(repository, ("third",), "tests/scripts/test_third.py") is third


def test_deleted_module_counts_as_changed(repository):
    (repository / "llmcond/heads/fit.py").unlink()
    assert may_have_changed(repository, ("first",), TEST)


def test_every_script_may_have_changed_without_git_history(repository, tmp_path_factory):
    assert changed_files(repository, n_commits=N_COMMITS + 1) is None
    copied = tmp_path_factory.mktemp("copied")
    assert changed_files(copied) is None
    assert may_have_changed(copied, ("first",), TEST)
