"""The script that tags a release, the files that publish it, and what it publishes."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import check_install
import pytest
import release
import yaml
from helpers.paths import ROOT


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["release.py", *arguments])
    release.main()


def test_next_version_is_tagged_from_clean_main_branch(tmp_path, monkeypatch, capsys):
    for name in ("CHANGELOG.md", "CITATION.cff", "llmcond/base/package.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("CHANGELOG", "CITATION", "VERSION", "ROOT"):
        path = getattr(release, name)
        monkeypatch.setattr(release, name, tmp_path / path.relative_to(ROOT))
    changelog = tmp_path / "CHANGELOG.md"
    section = "## [9.8.0] - unreleased\n\nIt flies.\n\n## [0"
    changelog.write_text(changelog.read_text().replace("## [0", section, 1))
    release.git("init", "--quiet", "--initial-branch", "main")
    release.git("config", "user.name", "A")
    release.git("config", "user.email", "a@example.com")
    with pytest.raises(SystemExit, match="the clone has changes"):
        run(monkeypatch, "9.8.0")
    release.git("add", ".")
    release.git("commit", "--quiet", "--message", "Start")
    with pytest.raises(SystemExit, match=r"no section \[9\.9\.9\]"):
        run(monkeypatch, "9.9.9")
    run(monkeypatch, "9.8.0")
    assert "git push origin main v9.8.0" in capsys.readouterr().out
    assert release.git("tag", "--list") == "v9.8.0"
    assert '__version__ = "9.8.0"' in (tmp_path / "llmcond" / "base" / "package.py").read_text()
    assert "\nversion: 9.8.0\n" in (tmp_path / "CITATION.cff").read_text()
    run(monkeypatch, "--check", "v9.8.0")
    run(monkeypatch, "--notes", "v9.8.0")
    assert capsys.readouterr().out == "It flies.\n"


def test_workflows_and_containers_run_existing_scripts_and_follow_good_practice():
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        scripts = re.findall(r"(?:scripts|\.ci)/\w[\w.]*", path.read_text(encoding="utf-8"))
        assert [name for name in scripts if not (ROOT / name).is_file()] == []
        assert workflow["permissions"] == {"contents": "read"}  # jobs ask for more
    dockerfiles = sorted((ROOT / "docker").glob("*.Dockerfile"))
    zizmor = ["zizmor", "--offline", "--quiet", "--no-progress", ROOT / ".github"]
    for name, *arguments in (zizmor, ["hadolint", *dockerfiles]):
        command = [Path(sys.executable).with_name(name), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
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
        if name.startswith(("prompts/", "heads/", "models/minilm-", "llmcond/")):
            target = name if name.startswith("llmcond/") else f"llmcond/_bundled/{name}"
            assert shipped.get(target) == (ROOT / name).read_bytes(), name
    assert not any("mpnet" in name for name in shipped if name.endswith(".safetensors"))
