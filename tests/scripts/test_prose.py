"""Counts of wording that is hard to read, on a small checkout."""

from importlib import import_module

import pytest
from helpers.paths import ROOT

CODE = '''"""What is told of rows."""


class Part:
    def _kept(self, own, limit):
        """See :class:`Base`."""
        found = own  # here nothing else happens
        return found


parser.add_argument("--seeds", help="of the fits")
parser.add_argument("--price", help="with --plan: price of an hour")
parser.add_argument("--dim", help=f"dimension, {limit} at most")
'''
PAGE = f"""# A page

One. Two. Three. Four. Five. Six.

- One. Two.
- One. Two. Three.

<!-- whoever -->
```bash
whoever runs this
```

{"word " * 36}end.
| told | in a table |
"""
FILES = {
    "llmcond/a.py": CODE,
    "llmcond/b.py": "class Part:\n    pass\n\n\nclass Other:\n    pass\n",
    "scripts/c.py": "class Other:\n    pass\n",
    "tests/d.py": "asked = {'help': 'told'}\n",
    "README.md": PAGE,
    "docs/tutorials/e.py": "# %% [markdown]\n# It is told.\n\n# %%\n# here\n",
}
COUNTS = {
    "words": ["told", "here", "nothing else", "told", "told"],
    "names": ["_kept", "found", "own"],
    "test names": ["asked"],
    "help": ["of the fits"],
    "roles": [":class:`"],
    "see": ["See :class:`Base`."],
    "classes": ["Part", "Part"],
    "sentences": [f"{'word ' * 36}end."],
    "paragraphs": [
        "6 sentences: One. Two. Three. Four. Five. Six.",
        "3 sentences: - One. Two. Three.",
    ],
}


@pytest.fixture
def prose(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return import_module("prose")


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_findings_are_counted_and_located(prose, checkout):
    findings = prose.measure(checkout)
    texts = {name: sorted(text for _, text in items) for name, items in findings.items()}
    assert texts == {name: sorted(expected) for name, expected in COUNTS.items()}
    assert findings["help"] == [("llmcond/a.py:11", "of the fits")]
    assert [location for location, _ in findings["paragraphs"]] == ["README.md:3", "README.md:6"]


def test_check_fails_for_each_count_above_limit(prose, checkout, capsys, monkeypatch):
    arguments = ["--root", str(checkout), "--check"]
    limits = {name: len(texts) for name, texts in COUNTS.items()}
    monkeypatch.setattr(prose, "LIMITS", limits)
    assert prose.main(arguments) == 0
    assert capsys.readouterr().out == ""
    for name in COUNTS:
        monkeypatch.setattr(prose, "LIMITS", {**limits, name: limits[name] - 1})
        assert prose.main(arguments) == 1
        printed = capsys.readouterr().out
        assert printed.startswith(f"{name}: {limits[name]}, limit {limits[name] - 1} (")
        assert f"scripts/prose.py --list {name}" in printed


def test_findings_are_listed(prose, checkout, capsys):
    assert prose.main(["--root", str(checkout), "--list", "names"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "llmcond/a.py:5: _kept"
