"""One Ray for all tests of a process, and a run with a head."""

import os
import shutil
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def actors_import_helpers():
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before]))
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="session")
def ray(actors_import_helpers):
    from llmcond.scale.pool import Cluster, connected

    with connected(Cluster(actors=3)) as ray:
        yield ray


@pytest.fixture(scope="session")
def fitted(tmp_path_factory, tiny_run):
    """A run of a tiny encoder with a linear head."""
    from llmcond.workflows.fit import fit_head

    folder = tmp_path_factory.mktemp("fitted") / "run"
    shutil.copytree(tiny_run, folder)
    fit_head(folder, "linear", changes={"epochs": "2"}, device="cpu")
    return folder
