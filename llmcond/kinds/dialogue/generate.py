"""Generation of candidates for next turns by a causal language model, saved in the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmcond.errors import UserError, first_line
from llmcond.files import digest_files, digest_text
from llmcond.log import log
from llmcond.progress import CountBar
from llmcond.runs.run import Run
from llmcond.system import choose_device

#: Sampling parameters of Triple-Encoders (ACL 2024) for DialoGPT; the length is that of the
#: released code.
_SAMPLING: Mapping[str, Any] = {
    "top_p": 0.8,
    "temperature": 0.8,
    "min_new_tokens": 1,
    "max_new_tokens": 40,
}
#: Candidates depend only on this seed and the turns before them.
_SEED = 0


def generate(
    run: Run, model: str, split: str, history: Sequence[int], samples: int, device: str
) -> Path:
    """Generate candidates after the first h turns of dialogues, and return their file.

    The file has a JSON object per line: ``dialogue``, an id; ``history``, h; ``candidates``, a list
    of texts. It is saved in the run, under a name that depends on everything that determines its
    content, so that the same call finds it again. An interrupted call is resumed.

    Args:
        run: run with the dialogues.
        model: hub name or folder of a causal language model with weights in safetensors.
        split: split of the run.
        history: numbers of turns, h.
        samples: number of texts for each dialogue and h.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Returns:
        The path of the file.

    Raises:
        UserError: The model cannot be loaded, it generates only empty texts, or dialogues have the
            same id.
    """
    turns, texts = run.data.turns_of(split), run.data.texts
    if len(set(turns.ids)) < len(turns.ids):
        raise UserError(
            f"several {split} dialogues of {run.folder} have the same id, but candidates are saved "
            "by id. Make the ids unique, and extract into a new --run."
        )
    histories = [
        (turns.ids[row], h, [texts[i] for i in context])
        for h in history
        for row, context in zip(*(column.tolist() for column in turns.contexts(h)[:2]), strict=True)
    ]
    identity = [
        run.manifest["data"]["digest"],
        split,
        _identify_model(model),
        str(_SAMPLING),
        samples,
    ]
    path = run.folder / "generated" / f"{digest_text(json.dumps([*identity, _SEED]))}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        _add_missing(path, histories, model, samples, device)
    return path


def _add_missing(
    path: Path,
    histories: Sequence[tuple[str, int, Sequence[str]]],
    model: str,
    samples: int,
    device: str,
) -> None:
    """Add the missing candidates of histories (dialogue, number of turns, turns) to a file."""
    done = _read_rows(path)
    missing = [item for item in histories if (item[0], item[1]) not in done]
    if not missing:
        log.info(f"all candidates of {model} exist already: {path}")
        return
    log.info(f"{samples:,} candidates of {model} for {len(missing):,} histories -> {path}")
    generator = _Generator(model, choose_device(device))
    # The file is rewritten without an incomplete last line, which an interrupted call leaves.
    complete_lines = "".join(
        f"{json.dumps(done_row, ensure_ascii=False)}\n" for done_row in done.values()
    )
    path.write_text(complete_lines, encoding="utf-8")
    with path.open("a", encoding="utf-8") as stream, CountBar("generating") as bar:
        for number, (dialogue, h, context) in enumerate(missing, 1):
            seed = int(digest_text(str(_SEED), *context, size=4), 16)
            candidates = generator.sample(context, samples, seed)
            row = {"dialogue": dialogue, "history": h, "candidates": candidates}
            stream.write(f"{json.dumps(row, ensure_ascii=False)}\n")
            stream.flush()
            bar.on_item(number, len(missing))


def _read_rows(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the complete rows of a file by dialogue and history."""
    rows = {}
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    for line in lines[:-1]:  # The last line is empty or incomplete.
        row = json.loads(line)
        rows[row["dialogue"], row["history"]] = row
    return rows


def _identify_model(model: str) -> str:
    """Return an identifier of a model: the digest of its files, or its hub name and commit."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        files = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]
        return digest_files(folder, files)
    from transformers import AutoConfig

    with _report_loading_errors(model):
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    return f"{model}@{config._commit_hash}"


class _Generator:
    """A causal language model that generates next turns."""

    def __init__(self, model: str, device: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with _report_loading_errors(model):
            self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            loaded = AutoModelForCausalLM.from_pretrained(
                model, trust_remote_code=False, use_safetensors=True
            )
        self._name, self._model = model, loaded.eval().to(device)
        end = self._tokenizer.eos_token
        self._end = "\n" if end is None else end
        max_length = getattr(loaded.config, "max_position_embeddings", None) or 1_024
        self._max_context = max(1, min(max_length, 1_024) - _SAMPLING["max_new_tokens"])

    def sample(self, context: Sequence[str], samples: int, seed: int) -> list[str]:
        """Sample texts that may follow some turns, without empty ones.

        Raises:
            UserError: All samples are empty.
        """
        import torch

        tokens = self._tokenizer(
            "".join(f"{turn}{self._end}" for turn in context),
            add_special_tokens=False,
            return_tensors="pt",
        ).input_ids[:, -self._max_context :]
        tokens = tokens.to(self._model.device)
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            outputs = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                num_return_sequences=samples,
                pad_token_id=self._tokenizer.pad_token_id or self._tokenizer.eos_token_id or 0,
                **_SAMPLING,
            )
        texts = self._tokenizer.batch_decode(
            outputs[:, tokens.shape[1] :], skip_special_tokens=True
        )
        candidates = [" ".join(text.split()) for text in texts]
        candidates = [text for text in candidates if text]
        if not candidates:
            raise UserError(
                f"{self._name} generates only empty texts after {context[-1][:80]!r}, in "
                f"{samples:,} samples. Choose a model for dialogues, or more --samples."
            )
        return candidates


@contextmanager
def _report_loading_errors(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{model} cannot be loaded as a causal language model with weights in safetensors: "
            f"{first_line(error)}"
        ) from error
