"""Texts as users have them: the rows that go in come out, or one message says what is wrong.

``scripts/fuzz_texts.py`` draws the inputs, and ``scripts/fuzz.py`` tries more of them.
"""

import shutil
from pathlib import Path
from random import Random

import pytest
from fuzz_texts import COMMANDS, FORMATS, FUNCTIONS, LISTS, TABLES, file_input, object_input

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(tiny_run, folder / "run")
    return folder


def make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_files_come_out(form: str, base: Path, tmp_path: Path) -> None:
    for command in COMMANDS:
        for seed in range(3):
            work = make_folder(tmp_path / f"{command}{seed}")
            assert file_input(Random(seed), base, work, form, command).failure() == ""


@pytest.mark.parametrize("form", [*TABLES, *LISTS])
def test_rows_of_objects_come_out(form: str, base: Path, tmp_path: Path) -> None:
    for seed, function in enumerate(FUNCTIONS):
        work = make_folder(tmp_path / function)
        assert object_input(Random(seed), base, work, form, function).failure() == ""
