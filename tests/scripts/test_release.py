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

import llmcond

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with the files that the script changes."""
    for name in ("CHANGELOG.md", "CITATION.cff", "llmcond/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("CHANGELOG", "CITATION", "VERSION", "ROOT"):
        path = getattr(release, name)
        monkeypatch.setattr(release, name, tmp_path / path.relative_to(ROOT))
    changelog = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    released = rf"(?<=^## \[{re.escape(llmcond.__version__)}\] - ).*$"
    changelog = re.sub(released, "unreleased", changelog, flags=re.MULTILINE)
    (tmp_path / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    release.git("init", "--quiet", "--initial-branch", "main")
    release.git("config", "user.name", "A")
    release.git("config", "user.email", "a@example.com")
    release.git("add", ".")
    release.git("commit", "--quiet", "--message", "Start")
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["release.py", *arguments])
    release.main()


def test_next_version_is_tagged(clone, monkeypatch, capsys):
    changelog = clone / "CHANGELOG.md"
    section = "## [9.8.0] - unreleased\n\nIt flies.\n\n## [0"
    changelog.write_text(changelog.read_text().replace("## [0", section, 1))
    release.git("commit", "--quiet", "--all", "--message", "Describe")
    run(monkeypatch, "9.8.0")
    assert "git push origin main v9.8.0" in capsys.readouterr().out
    assert release.git("tag", "--list") == "v9.8.0"
    assert release.git("status", "--porcelain") == ""
    assert '__version__ = "9.8.0"' in (clone / "llmcond" / "version.py").read_text()
    assert "\nversion: 9.8.0\n" in (clone / "CITATION.cff").read_text()
    assert re.search(r"^## \[9\.8\.0\] - \d{4}-\d\d-\d\d$", changelog.read_text(), re.MULTILINE)
    run(monkeypatch, "--check", "v9.8.0")
    run(monkeypatch, "--notes", "v9.8.0")
    assert capsys.readouterr().out == "It flies.\n"
    with pytest.raises(SystemExit, match=r"the tag v9\.8\.0 exists"):
        run(monkeypatch, "9.8.0")


def test_present_version_can_be_released(clone, monkeypatch):
    run(monkeypatch, llmcond.__version__)
    assert release.git("tag", "--list") == f"v{llmcond.__version__}"


@pytest.mark.parametrize(
    ("version", "message"),
    [("next", "expected a form like"), ("9.9.9", r"no section \[9\.9\.9\]")],
)
def test_invalid_version_is_rejected(clone, monkeypatch, version, message):
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, version)
    assert release.git("tag", "--list") == ""


def test_changed_clone_and_other_branch_are_rejected(clone, monkeypatch):
    (clone / "new.txt").touch()
    with pytest.raises(SystemExit, match="the clone has changes"):
        run(monkeypatch, llmcond.__version__)
    (clone / "new.txt").unlink()
    release.git("switch", "--quiet", "--create", "other")
    with pytest.raises(SystemExit, match="the branch is 'other'"):
        run(monkeypatch, llmcond.__version__)


def test_tag_of_other_version_fails_check(clone, monkeypatch):
    with pytest.raises(SystemExit, match=r"has no section \[7\.0\.0\]"):
        run(monkeypatch, "--check", "v7.0.0")
    with pytest.raises(SystemExit, match=r"no date for .* but 'unreleased'"):
        run(monkeypatch, "--check", llmcond.__version__)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_existing_scripts(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    commands = [
        step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step
    ]
    scripts = re.findall(r"(?:scripts|\.ci)/\w[\w.]*", "\n".join(commands))
    assert scripts
    assert [name for name in scripts if not (ROOT / name).is_file()] == []
    assert workflow["permissions"] == {"contents": "read"}  # jobs ask for more where they need it


def test_weights_are_verified_without_llmcond(tmp_path):
    """The workflow that builds the package of weights does not install llmcond."""
    lines = (ROOT / "packages" / "minilm" / "SHA256SUMS").read_text().splitlines()
    first = lines[0].split("  ")[1]
    (tmp_path / first).parent.mkdir()
    command = [sys.executable, "-I", ROOT / "scripts" / "make_weights.py"]
    command += ["--from", tmp_path, "--out", tmp_path / "dist"]
    code = "import runpy, sys; sys.modules['llmcond'] = None; sys.argv = sys.argv[1:]; "
    command[2:3] = ["-c", f"{code}runpy.run_path(sys.argv[0], run_name='__main__')", command[2]]
    for content, message in ((None, f"has no {first}"), ("changed", "has the SHA-256")):
        if content is not None:
            (tmp_path / first).write_text(content)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert not (tmp_path / "dist").exists()


def test_workflows_have_no_known_weakness():
    zizmor = [Path(sys.executable).with_name("zizmor"), "--offline", "--quiet", "--no-progress"]
    done = subprocess.run([*zizmor, ROOT / ".github"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfiles_follow_good_practice():
    hadolint = Path(sys.executable).with_name("hadolint")
    files = sorted((ROOT / "docker").glob("*.Dockerfile"))
    assert len(files) == 2
    done = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
