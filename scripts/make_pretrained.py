r"""Write a trained encoder with its head into models/, as a bundled model.

    python scripts/make_pretrained.py runs/csts --name minilm-csts
    python scripts/make_pretrained.py runs/next --name minilm-conditions \
        --average models/minilm-conditions
    python scripts/make_pretrained.py runs/mpnet --name mpnet-conditions --half

docs/results.md has the commands that trained the runs. The script writes what `llmcond push`
uploads: the adapter, the head, the training record and the model card, without rows, features and
paths. The model computes in float32, whatever its training used. Its card ends with its credits in
models/credits.toml.

``--average`` averages the weights of the adapter with those of an earlier stage (Wortsman and
others, "Robust fine-tuning of zero-shot models", CVPR 2022), which retains more of what that stage
knew. ``--half`` stores the adapter in 16 bit, in half the space.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import Options
from make_credits import SECTION, model_texts
from safetensors.torch import load_file, save_file

from llmcond.base.files import read_json, write_json
from llmcond.base.package import bundled_folder
from llmcond.encoders.adapter import (
    CARD,
    TRAINING_RECORD,
    WEIGHTS,
    EncoderRecord,
    identify,
    read_encoder_record,
    write_encoder_record,
)
from llmcond.runs import open_any_run
from llmcond.runs.portable import save_portable_run


def average_weights(folder: Path, other: Path, share: float) -> None:
    """Average the adapter of a folder with another one, and record it with the dev rows of both.

    Args:
        folder: folder of the adapter, whose weights are replaced.
        other: folder of another adapter with the same layers and rank.
        share: share of the first adapter's weights.
    """
    record = read_json(folder / TRAINING_RECORD)
    if record["summary"]["scores"]:
        raise SystemExit(f"{folder.name} has scores, which the average would not have.")
    first, second = load_file(folder / WEIGHTS), load_file(other / WEIGHTS)
    mixed = {name: share * weight + (1 - share) * second[name] for name, weight in first.items()}
    save_file(mixed, folder / WEIGHTS, metadata={"format": "pt"})
    rest = round(1 - share, 6)
    record["averaged_with"] = {"weights": open_any_run(other).identity.weights, "share": rest}
    write_json(folder / TRAINING_RECORD, record)
    tuned, earlier = (read_encoder_record(path) or EncoderRecord() for path in (folder, other))
    digests = " ".join(sorted(tuned.dev_digests | earlier.dev_digests))
    write_encoder_record(folder, replace(tuned, dev_of=digests or None))
    body = (folder / CARD).read_text(encoding="utf-8").partition(SECTION)[0].rstrip()
    text = (
        f"{body}\n\n## Average\n\nAfter the training, the weights were averaged with those of "
        f"`{other.name}`, whose share is {rest:g}.\n"
    )
    (folder / CARD).write_text(text, encoding="utf-8")


def record_float32(folder: Path, name: str) -> None:
    """Record the bundled name and the weights of the encoder, and that it computes in float32.

    CPUs without bfloat16 instructions take many times as long in bfloat16. Vectors of a model that
    was trained in bfloat16 then differ by rounding, which is harmless because the bundled model
    contains no features that they would have to match.
    """
    identity = open_any_run(folder).identity
    weights = identify(folder, name, identity.weights.partition(" on ")[2])
    # In float32, OpenVINO's vectors are those of PyTorch up to rounding, and are recorded as such.
    identity = replace(identity, dtype="float32", runtime="torch", weights=weights)
    for path in (folder / "run.json", *folder.glob("heads/*/head.json")):
        record = read_json(path)
        record["encoder"] |= {
            "name": name,
            "fingerprint": identity.fingerprint,
            "identity": identity.to_json(),
        }
        write_json(path, record)


def main() -> None:
    """Stage the run, and replace the bundled model of this name by it."""
    parser = Options(__doc__)
    parser.option("run", Path, "run folder that train-lora wrote")
    parser.option(
        "--name", str, "name of the model, which replaces any of this name", required=True
    )
    parser.option("--out", bundled_folder("models"), "folder of the model", "models/")
    parser.option("--average", Path, "folder of an adapter to average the weights with", "none")
    parser.option("--share", 0.75, "share of the run's weights in the average")
    parser.add_argument("--half", action="store_true", help="store the adapter in float16")
    options = parser.parse_args()
    target = options.out / options.name
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, options.name)
        save_portable_run(options.run, folder)
        if options.average:
            average_weights(folder, options.average, options.share)
        if options.half:
            weights = load_file(folder / WEIGHTS)
            halved = {name: weight.half() for name, weight in weights.items()}
            save_file(halved, folder / WEIGHTS, metadata={"format": "pt"})
        record_float32(folder, options.name)
        for path, text in model_texts(folder, options.name).items():
            path.write_text(text, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    sys.stdout.write(f"{target}: {size / 2**20:.1f} MiB\n")


if __name__ == "__main__":
    main()
