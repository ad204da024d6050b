import os, shutil
from importlib import import_module
from pathlib import Path
import pytest
from helpers.dialogues import write_dialogues
import sys

sys.path.insert(0, str(Path(__file__).parent))
from test_reproduce import SCRIPTS, QUICK


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SCRIPTS)
def test_record(name, tiny_checkpoint, small_rows, write_rows, graph, tmp_path):
    options, numbers = SCRIPTS[name]
    data = graph if name == "reproduce_graphs" else write_rows(small_rows)
    if name == "reproduce_triple":
        data = write_dialogues(tmp_path / "dialogues")
    elif name == "reproduce_csr":
        options = [*options, "--kgc-data", str(graph), "--kgc-share", "2"]
    encoder, out = str(tiny_checkpoint(hidden=64)), tmp_path / "page.md"
    arguments = [
        "--encoders",
        encoder,
        "nope/nope",
        "--data",
        str(data),
        "--folder",
        str(tmp_path / "runs"),
    ]
    main = getattr(import_module(name), "main", None)
    if main is None:
        from reproduce import run_paper

        main = lambda a: run_paper(import_module(name).PAPER, a)
    assert main([*arguments, *QUICK, *options, "--out", str(out)]) == 0
    target = Path(os.environ["SCR_OUT"]) / name
    target.mkdir(parents=True, exist_ok=True)
    text = (
        out.read_text()
        .replace(encoder, "ENC")
        .replace(str(tmp_path), "TMP")
        .replace(Path(encoder).name, "ENC")
    )
    (target / "page.md").write_text(text)
    for p in tmp_path.glob("page*"):
        if p.is_file() and p.name != "page.md":
            shutil.copy(p, target / p.name)
