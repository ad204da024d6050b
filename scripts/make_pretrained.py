"""Write a trained encoder with its head into models/, as the bundled model.

    python scripts/make_pretrained.py runs/csts --name minilm-csts
    python scripts/make_pretrained.py runs/conditions

docs/results.md has the commands that trained the runs. The script writes what `llmcond push`
uploads: the adapter, the head, the training record and the model card, without rows, features and
paths. The model computes in float32, whatever its training used. Its card ends with its credits in
models/credits.toml.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import Options
from make_credits import model_texts

from llmcond.base.files import read_json, write_json
from llmcond.base.package import DEFAULT_MODEL, bundled_folder
from llmcond.runs import open_any_run
from llmcond.runs.portable import save_portable_run


def record_float32(folder: Path, name: str) -> None:
    """Record the bundled name of the encoder, and that it computes in float32.

    CPUs without bfloat16 instructions take many times as long in bfloat16. Vectors of a model that
    was trained in bfloat16 then differ by rounding, which is harmless because the bundled model
    contains no features that they would have to match.
    """
    identity = replace(open_any_run(folder).identity, dtype="float32")
    for path in (folder / "run.json", *folder.glob("heads/*/head.json")):
        record = read_json(path)
        record["encoder"] |= {
            "name": name,
            "fingerprint": identity.fingerprint,
            "identity": identity.to_json(),
        }
        write_json(path, record)


def main() -> None:
    """Stage the run, and replace the bundled model by it."""
    parser = Options(__doc__)
    parser.option("run", Path, "run folder that train-lora wrote")
    parser.option("--name", DEFAULT_MODEL, "name of the bundled model")
    parser.option("--out", bundled_folder("models"), "folder of the model", "models/")
    options = parser.parse_args()
    target = options.out / options.name
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, options.name)
        save_portable_run(options.run, folder)
        record_float32(folder, options.name)
        for path, text in model_texts(folder, options.name).items():
            path.write_text(text, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    sys.stdout.write(f"{target}: {size / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
