"""The script that tags a release, and the files of workflows and containers that publish it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

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
