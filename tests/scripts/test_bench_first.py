"""The benchmark of a first result: programs that are timed, and the log of their imports."""

from importlib import import_module

import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.script("bench_first")

LOG = """import time: self [us] | cumulative | imported package
import time:       120 |        120 |   numpy.linalg
some output of the program
import time:      1000 |       1120 | numpy
import time:       400 |        400 | json
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("bench_first")


def test_import_times_are_summed_by_package(script):
    assert script.add_up_imports(LOG) == [
        {"package": "numpy", "milliseconds": 1.12, "modules": 2},
        {"package": "json", "milliseconds": 0.4, "modules": 1},
    ]


def test_program_is_measured_and_its_failure_is_printed(script, tmp_path, capsys):
    usage = script.run_program(script.make_arguments("assert FOLDER", "a", "b"), str(tmp_path))
    assert 0 < usage["processor"] < 60
    assert usage["memory"] > 1
    with pytest.raises(SystemExit, match="a program failed"):
        script.run_program(script.make_arguments("1 / 0", "a", "b"), str(tmp_path))
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_way_with_missing_library_is_left_out(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "WAYS", {"first": "", "second": ""})
    monkeypatch.setattr(script, "MODULES", {"second": ("no_such_module",)})
    assert script.choose_ways() == {"first": ""}
    assert capsys.readouterr().err == "second is left out: no_such_module is not installed.\n"


def test_programs_compile_and_requirements_belong_to_ways(script):
    for program in script.WAYS.values():
        if program is not None:
            compile(script.make_arguments(program, "a", "b")[1], "program", "exec")
    assert script.MODULES.keys() < script.WAYS.keys()
