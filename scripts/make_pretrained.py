"""Put an encoder that was trained, with its head, into models/: the bundled model.

    python scripts/make_pretrained.py runs/csts --name minilm-csts

docs/results.md has the command that made the run. What is laid out is what `llmcond push` uploads:
adapter, head, the account of the training and the card, without rows, features and paths.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from llmcond.bundled import PRETRAINED, bundled
from llmcond.workflows.push import stage_run


def main() -> None:
    """Stage the run, and put it in place."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder that train-lora made")
    parser.add_argument("--name", default=PRETRAINED)
    parser.add_argument("--out", type=Path, default=bundled("models"), help="default: models/")
    given = parser.parse_args()
    target = given.out / given.name
    with tempfile.TemporaryDirectory() as temporary:
        stage_run(given.run, Path(temporary))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(temporary, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    sys.stdout.write(f"{target}: {size / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
