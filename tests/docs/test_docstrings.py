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


def test_docstrings_are_complete():
    for name in PUBLIC:
        value = load(name)
        headings = find_sections(inspect.getdoc(value) or "")
        assert "Examples" in headings, name
        if not inspect.isclass(value):
            signature = inspect.signature(value)
            assert "Args" in headings or not signature.parameters, name
            assert "Returns" in headings or signature.return_annotation in (None, "None"), name


def test_examples_define_every_name_that_they_use(tmp_path):
    """Few examples run by default, but all are checked for undefined names."""
    for name in PUBLIC:
        for test in doctest.DocTestFinder(exclude_empty=True).find(load(name), name, globs={}):
            code = "".join(example.source for example in test.examples)
            (tmp_path / f"{test.name}.py").write_text(code)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", tmp_path]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


#: Examples that run by default: a class, a result, a loader, a command and a function of heads.
EXAMPLES = (
    "llmcond.Condition",
    "llmcond.Estimate",
    "llmcond.load_embedder",
    "llmcond.fit_head",
    "llmcond.heads.fit_recipe",
)


@pytest.mark.parametrize(
    "name",
    [name if name in EXAMPLES else pytest.param(name, marks=pytest.mark.slow) for name in PUBLIC],
)
def test_examples_run(name, in_tmp, capsys):
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(load(name), name, globs={}):
        runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
    assert runner.tries > 0
