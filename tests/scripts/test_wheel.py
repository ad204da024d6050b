"""The wheel contains prompts, heads, the model and the sample, and works without the repository."""

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


def run_installed(installed: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=installed.parent,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout


def test_installed_package_is_imported(installed):
    path = run_installed(installed, "-c", "import llmcond; print(llmcond.__file__)")
    assert Path(path.strip()).is_relative_to(installed)


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_bundled_files_equal_those_of_repository(installed, kind):
    output = json.loads(run_installed(installed, "-m", "llmcond", kind, "--json"))
    listed = [row for rows in output.values() for row in rows]
    paths = list((ROOT / kind).rglob("*.toml"))  # those of a task are in a subfolder
    assert sorted(row["name"] for row in listed) == sorted(path.stem for path in paths)
    for path in paths:
        shipped = installed / "llmcond" / "_bundled" / path.relative_to(ROOT)
        assert shipped.read_bytes() == path.read_bytes()


def test_bundled_model_is_included(installed):
    paths = [path for path in (ROOT / "models").rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        shipped = installed / "llmcond" / "_bundled" / path.relative_to(ROOT)
        assert shipped.read_bytes() == path.read_bytes()


def test_sample_data_are_included(installed):
    code = (
        "from llmcond.data.datasets import read_dataset\n"
        "print(sum(len(rows) for rows in read_dataset(None).splits.values()))"
    )
    assert int(run_installed(installed, "-c", code)) >= 1_200
    code = "from llmcond.kinds.ranking.graph import read_graph; print(read_graph().n_entities)"
    assert int(run_installed(installed, "-c", code)) == 270
