"""The wheel carries all it needs: prompts, heads and the sample, away from the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as pip installs it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run_there(installed: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=installed.parent,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_it_is_the_installed_package_that_answers(installed):
    where = run_there(installed, "-c", "import llmcond; print(llmcond.__file__)")
    assert Path(where.strip()).is_relative_to(installed)


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_bundled_files_are_those_of_the_repository(installed, kind):
    found = json.loads(run_there(installed, "-m", "llmcond", kind, "--json"))
    listed = [row for rows in found.values() for row in rows]
    paths = list((ROOT / kind).rglob("*.toml"))  # those of a task are in a folder of its own
    assert sorted(row["name"] for row in listed) == sorted(path.stem for path in paths)
    for path in paths:
        shipped = installed / "llmcond" / "_bundled" / path.relative_to(ROOT)
        assert shipped.read_bytes() == path.read_bytes()


def test_the_bundled_model_is_there(installed):
    paths = [path for path in (ROOT / "models").rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        shipped = installed / "llmcond" / "_bundled" / path.relative_to(ROOT)
        assert shipped.read_bytes() == path.read_bytes()


def test_the_sample_is_there(installed):
    code = (
        "from llmcond.data.datasets import read_dataset\n"
        "print(sum(len(rows) for rows in read_dataset(None).splits.values()))"
    )
    assert int(run_there(installed, "-c", code)) >= 1_200
    code = "from llmcond.kinds.ranking.graph import read_graph; print(read_graph().n_entities)"
    assert int(run_there(installed, "-c", code)) == 270
