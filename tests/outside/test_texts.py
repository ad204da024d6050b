"""Texts as users have them: the rows that go in come out, or one message says what is wrong.

``scripts/fuzz_texts.py`` draws the inputs, and ``scripts/fuzz.py`` tries more of them.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from fuzz_changes import Base, Input
from fuzz_texts import (
    COMMANDS,
    FORMATS,
    FUNCTIONS,
    LISTS,
    TABLES,
    file_input,
    object_input,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(tiny_run, folder / "run")
    return Base(folder)


def find_failures(make: Callable[[Random, Path], Input], folder: Path, count: int) -> list[str]:
    """Try inputs with the seeds from 0, each in a folder of its own."""
    failures = []
    for seed in range(count):
        work = folder / str(seed)
        work.mkdir()
        failures.append(make(Random(seed), work).failure())
    return [failure for failure in failures if failure]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_files_come_out(form: str, command: str, base: Base, tmp_path: Path) -> None:
    make = lambda chance, work: file_input(chance, base, work, form, command)  # noqa: E731
    assert find_failures(make, tmp_path, 10) == []


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("form", [*TABLES, *LISTS])
def test_rows_of_objects_come_out(form: str, function: str, base: Base, tmp_path: Path) -> None:
    make = lambda chance, work: object_input(chance, base, work, form, function)  # noqa: E731
    assert find_failures(make, tmp_path, 3) == []
