"""Docstrings of public names are complete, and their examples run."""

import doctest
import inspect
import re
import subprocess
import sys

import pytest

import llmcond
import llmcond.heads

#: Names only, because loading all of them would import several libraries in every worker.
PUBLIC = [
    f"{module.__name__}.{name}"
    for module in (llmcond, llmcond.heads)
    for name in module.__all__
    if name not in ("__version__", "MatrixLike")  # neither functions nor classes
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def load(name):
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def find_sections(text):
    return set(
        re.findall(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$", text, re.M)
    )


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_complete(name):
    value = load(name)
    headings = find_sections(inspect.getdoc(value) or "")
    assert "Examples" in headings
    if not inspect.isclass(value):
        signature = inspect.signature(value)
        assert "Args" in headings or not signature.parameters
        assert "Returns" in headings or signature.return_annotation in (None, "None")


def test_examples_define_every_name_that_they_use(tmp_path):
    """Only a fifth of the examples runs by default, but all are checked for undefined names."""
    for name in PUBLIC:
        for test in doctest.DocTestFinder(exclude_empty=True).find(load(name), name, globs={}):
            code = "".join(example.source for example in test.examples)
            (tmp_path / f"{test.name}.py").write_text(code)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.matrix
@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in finder.find(load(name), name, globs={}):
        runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries > 0
