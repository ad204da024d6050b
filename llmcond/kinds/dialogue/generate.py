"""Candidates for the next turn of dialogues from a causal language model, kept in the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmcond.errors import UserError, first_line
from llmcond.files import digest_files, digest_text
from llmcond.kinds.dialogue.run import DialogueRun
from llmcond.log import log
from llmcond.progress import CountBar
from llmcond.system import choose_device

#: As Triple-Encoders (ACL 2024) sampled from DialoGPT, but for the length: released code's.
_SAMPLING: Mapping[str, Any] = {
    "top_p": 0.8,
    "temperature": 0.8,
    "min_new_tokens": 1,
    "max_new_tokens": 40,
}
#: What is drawn depends on it, the dialogue and the number of turns only.
_SEED = 0


def generate(
    run: DialogueRun, model: str, split: str, history: Sequence[int], samples: int, device: str
) -> Path:
    """Return the file of what a language model says after the first h turns of dialogues.

    It holds a JSON object a line: ``dialogue``, its id; ``history``, h; ``candidates``, texts. It
    lies in the run, under a name of all that decides it: the same call finds it there. One that was
    stopped goes on where it was.

    Args:
        run: whose dialogues are used.
        model: a hub name or a folder, with weights in safetensors.
        split: of the run.
        history: numbers of turns, h.
        samples: how many texts for each dialogue and h.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UserError: a model that cannot be loaded, or with which nothing can be said.
    """
    turns, texts = run.data.of(split), run.data.texts
    if len(set(turns.ids)) < len(turns.ids):
        raise UserError(
            f"several {split} dialogues of {run.folder} have the same id, by which candidates are "
            "kept. Give them ids of their own, and extract into a new --run."
        )
    asked = [
        (turns.ids[row], h, [texts[i] for i in context])
        for h in history
        for row, context in zip(*(own.tolist() for own in turns.context(h)[:2]), strict=True)
    ]
    made_of = [run.manifest["data"]["digest"], split, _weights(model), str(_SAMPLING), samples]
    path = run.folder / "generated" / f"{digest_text(json.dumps([*made_of, _SEED]))}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        _complete(path, asked, model, samples, device)
    return path


def _complete(
    path: Path,
    asked: Sequence[tuple[str, int, Sequence[str]]],
    model: str,
    samples: int,
    device: str,
) -> None:
    """Add to a file what it lacks of what is asked for: dialogue, history and turns of each."""
    done = _read(path)
    missing = [one for one in asked if (one[0], one[1]) not in done]
    if not missing:
        log.info(f"candidates of {model} are there: {path}")
        return
    log.info(f"{samples:,} candidates of {model} for {len(missing):,} histories -> {path}")
    speaker = _Speaker(model, choose_device(device))
    # What was being written when another call was stopped is left out.
    kept = "".join(f"{json.dumps(own, ensure_ascii=False)}\n" for own in done.values())
    path.write_text(kept, encoding="utf-8")
    with path.open("a", encoding="utf-8") as stream, CountBar("generating") as bar:
        for number, (dialogue, h, context) in enumerate(missing, 1):
            own_seed = int(digest_text(str(_SEED), *context, size=4), 16)
            found = speaker.say(context, samples, own_seed)
            row = {"dialogue": dialogue, "history": h, "candidates": found}
            stream.write(f"{json.dumps(row, ensure_ascii=False)}\n")
            stream.flush()
            bar.on_item(number, len(missing))


def _read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the complete rows of a file by dialogue and history."""
    found = {}
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    for line in lines[:-1]:  # the last one has no end
        row = json.loads(line)
        found[row["dialogue"], row["history"]] = row
    return found


def _weights(model: str) -> str:
    """Return what identifies a model: its files' digest, or its name and commit on the hub."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]
        return digest_files(folder, files)
    from transformers import AutoConfig

    with _loading(model):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return f"{model}@{config._commit_hash}"


class _Speaker:
    """A causal language model that says what may come next."""

    def __init__(self, model: str, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with _loading(model):
            self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            loaded = AutoModelForCausalLM.from_pretrained(
                model, trust_remote_code=False, use_safetensors=True
            )
        self._name, self._model = model, loaded.eval().to(device)
        end = self._tokenizer.eos_token
        self._end = "\n" if end is None else end
        room = getattr(loaded.config, "max_position_embeddings", None) or 1_024
        self._room = max(1, min(room, 1_024) - _SAMPLING["max_new_tokens"])

    def say(self, context: Sequence[str], samples: int, seed: int) -> list[str]:
        """Return texts that may follow some turns, those that are empty left out."""
        import torch

        tokens = self._tokenizer(
            "".join(f"{turn}{self._end}" for turn in context),
            add_special_tokens=False,
            return_tensors="pt",
        ).input_ids[:, -self._room :]
        tokens = tokens.to(self._model.device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            said = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                num_return_sequences=samples,
                pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id or 0,
                **_SAMPLING,
            )
        texts = self._tokenizer.batch_decode(said[:, tokens.shape[1] :], skip_special_tokens=True)
        found = [" ".join(text.split()) for text in texts]
        found = [text for text in found if text]
        if not found:
            raise UserError(
                f"{self._name} says nothing after {context[-1][:80]!r}, in {samples:,} samples. "
                "Name a model of dialogues, or more --samples."
            )
        return found


@contextmanager
def _loading(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{model} cannot be loaded as a causal language model with weights in safetensors: "
            f"{first_line(error)}"
        ) from error
