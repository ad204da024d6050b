"""The sdist and the wheel are complete, and work in a new environment, away from the repository."""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import check_install
import pytest
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    check_install.build(folder)
    return folder


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with the wheel and what its extra ``demo`` requires.

    The dependencies are not downloaded. They are the files of this environment, but only of the
    packages that the wheel's metadata asks for.
    """
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    executable = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", executable]
    (wheel,) = dist.glob("*.whl")
    install = [*pip, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (installed,) = distributions(name="llmcond", path=[str(site)])
    for required in find_requirements(installed, "demo"):
        link_files(required, site)
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return executable


def find_requirements(package: Distribution, extra: str) -> list[Distribution]:
    """Return the packages that a package with an extra requires, directly and indirectly."""
    # Ray puts a folder with copies of other packages onto the path.
    installed = {canonicalize_name(one.name): one for one in distributions(path=[str(SITE)])}
    pending, visited = [(package.name, extra)], set()
    while pending:
        name, extra = pending.pop()
        if (name, extra) in visited:
            continue
        visited.add((name, extra))
        source = package if name == package.name else installed[name]
        for requirement in map(Requirement, source.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required = canonicalize_name(requirement.name)
                pending += [(required, extra) for extra in ("", *requirement.extras)]
    return [installed[name] for name in {name for name, _ in visited} - {package.name}]


def link_files(package: Distribution, site: Path) -> None:
    """Link the files of an installed package, and its compiled modules, into another folder."""
    for file in package.files or ():
        source = Path(str(file.locate()))
        compiled = Path(importlib.util.cache_from_source(str(source)))
        for path in (source, compiled) if source.suffix == ".py" else (source,):
            target = site / path.relative_to(SITE) if path.is_relative_to(SITE) else None
            if target and path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target)


def run_installed(python: Path, *arguments: str) -> str:
    return check_install.run(python, *arguments, cwd=python.parent)


def bundled_folder(python: Path) -> Path:
    (folder,) = python.parent.parent.glob("lib/python*/site-packages/llmcond/_bundled")
    return folder


def test_examples_of_readme_run(python, tmp_path):
    sample = bundled_folder(python).parent / "data" / "sample"
    tables = {path: path.read_text(encoding="utf-8") for path in sample.glob("*.csv")}
    for path, table in tables.items():  # the first rows, so that a fit takes a second
        path.write_text("".join(table.splitlines(keepends=True)[:25]), encoding="utf-8")
    try:
        assert check_install.run_readme(python, tmp_path) == 3
    finally:
        for path, table in tables.items():
            path.write_text(table, encoding="utf-8")


def test_extra_is_added_to_installed_package(python):
    """pip takes the extra from the installed package; no index is needed to find it."""
    install = ["install", "--dry-run", "--no-deps", "--no-index", "llmcond[excel]"]
    pip = [sys.executable, "-m", "pip", "--python", python, *install]
    output = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    assert "Requirement already satisfied: llmcond[excel]" in output


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_sdist_has_every_file_of_repository(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    git = ["git", "ls-files", "-z"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert tracked - packed == set()
    assert {name for name in packed if "/" not in name} - tracked == {"PKG-INFO"}


@pytest.mark.parametrize("kind", ["prompts", "heads"])
def test_bundled_files_equal_those_of_repository(python, kind):
    output = json.loads(run_installed(python, "-m", "llmcond", kind, "--json"))
    listed = [row for rows in output.values() for row in rows]
    paths = list((ROOT / kind).rglob("*.toml"))  # those of a task are in a subfolder
    assert sorted(row["name"] for row in listed) == sorted(path.stem for path in paths)
    for path in paths:
        shipped = bundled_folder(python) / path.relative_to(ROOT)
        assert shipped.read_bytes() == path.read_bytes()


def test_bundled_model_is_included(python):
    paths = [path for path in (ROOT / "models").rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        shipped = bundled_folder(python) / path.relative_to(ROOT)
        assert shipped.read_bytes() == path.read_bytes()


def test_notice_and_licence_are_included(python):
    (licences,) = bundled_folder(python).parents[1].glob("llmcond-*.dist-info/licenses")
    for name in ("LICENSE", "NOTICE"):
        assert (licences / name).read_bytes() == (ROOT / name).read_bytes()


def test_sample_data_are_included(python):
    code = (
        "from llmcond.data.datasets import read_dataset\n"
        "print(sum(len(rows) for rows in read_dataset(None).splits.values()))"
    )
    assert int(run_installed(python, "-c", code)) >= 1_200
    code = "from llmcond.kinds.ranking.graph import read_graph; print(read_graph().n_entities)"
    assert int(run_installed(python, "-c", code)) == 270
