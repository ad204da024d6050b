"""The sdist and the wheel are complete; ``scripts/check_install.py`` installs and tries them."""

import subprocess
import tarfile
import zipfile

import check_install
import pytest
from helpers.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_sdist_and_wheel_have_every_file(tmp_path):
    check_install.build(tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    git = ["git", "ls-files", "-z"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    assert tracked - packed == set()
    assert {name for name in packed if "/" not in name} - tracked == {"PKG-INFO"}
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist()}
    licences = {name.partition("/licenses/")[2] for name in shipped}
    assert {"LICENSE", "NOTICE"} <= licences
    for name in tracked:
        folder = name.partition("/")[0]
        if folder in ("prompts", "heads", "models", "llmcond"):
            target = name if folder == "llmcond" else f"llmcond/_bundled/{name}"
            assert shipped.get(target) == (ROOT / name).read_bytes(), name
