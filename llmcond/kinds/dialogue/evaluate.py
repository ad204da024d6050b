"""Scoring of dialogue runs: fitted heads and zero-shot rank next turns, or plan for a goal."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from llmcond.base.arrays import Array, Positions
from llmcond.base.errors import UserError, first_line
from llmcond.base.files import digest_files, digest_text, expand_home, write_text
from llmcond.base.metrics import Floats, Metric, choose_metrics, estimates_json
from llmcond.base.options import Ties
from llmcond.base.output import ProgressBar, log
from llmcond.base.system import choose_device
from llmcond.data.datasets import read_candidates
from llmcond.evaluation.paired import bootstrap_metrics
from llmcond.evaluation.results import Ranks, Result
from llmcond.kinds.dialogue.data import Dialogues, UtteranceInputs
from llmcond.kinds.dialogue.examples import (
    PLAN_DISTANCES,
    PLAN_HISTORIES,
    PLAN_METRICS,
    CandidatePoolFunction,
    DialogueExamples,
    NextQueries,
    PlanQueries,
    RandomPool,
    RetrievedPool,
    UtteranceRoles,
    index_candidates,
    join_turns,
    next_queries,
    plan_queries,
    query_rows,
    rank_next,
    rank_plans,
    read_samples,
    resolve_histories,
    stack_queries,
    subset_masks,
)
from llmcond.kinds.dialogue.heads import ContextScore, inverse_lengths, query_vectors
from llmcond.options.scoring import AnalyseOptions, EvaluateOptions
from llmcond.runs.examples import (
    AnyPredictor,
    Evaluation,
    read_ranked_data,
    resolve_predictors,
    result_without_metrics,
    score_ranks,
)
from llmcond.runs.open import extract_other_data
from llmcond.runs.run import Run

#: Scores with which zero-shot is evaluated by default, in addition to the score of its recipe.
_ZERO_SHOT_SCORES = ("average", "bi", "maxsim")
#: The score that compares candidates with one vector of all turns, which are encoded as one text.
JOINED = "joined"
#: Scores of planning: equation 4, and the candidate alone (section 4.2.1).
_PLANNING_SCORES = ("average", "bi")
#: Names of the candidate pools that come from the data, for next turns and for planning.
_RANKING_POOLS, _PLANNING_POOLS = ("same-depth", "all"), ("retrieved", "same-depth", "random")


def evaluate_dialogues(run: Run, options: EvaluateOptions) -> Evaluation:
    """Rank the next turns of a split's dialogues by a run's heads, and by zero-shot.

    Options and errors are those of ``AnyTask.evaluate``.
    """
    score_names = tuple(
        score if score == JOINED else str(ContextScore.parse(score)) for score in options.score
    )
    histories = _parse_numbers(options.history, "--history")
    metrics = choose_metrics(run.task.metrics, options.metric)
    scoring = _Scoring(run, options)
    pool = options.candidates or "same-depth"
    candidates: Any = pool
    extra_texts: Sequence[str] = ()
    if pool not in _RANKING_POOLS:
        _check_pool("--candidates", pool, _RANKING_POOLS, "a file of texts, one per line")
        candidates, extra_texts = index_candidates(
            scoring.data, read_candidates(Path(pool), options.read_options())
        )
    queries = next_queries(scoring.data, scoring.split_key, histories, candidates)
    joined: list[NextQueries] = []
    if JOINED in score_names:
        joined, joined_texts = join_turns(queries, [*scoring.data.texts, *extra_texts])
        extra_texts = [*extra_texts, *joined_texts]
        log.info(
            f"score joined: {len(joined_texts):,} texts of all turns before, newest first; a "
            "dialogue is encoded again at every turn"
        )
    examples = scoring.examples(extra_texts)
    used = _used_texts(array for q in [*queries, *joined] for array in (q.contexts, q.candidates))
    _log_queries(queries, scoring, pool)
    for predictor in scoring.predictors:
        roles = examples.roles(predictor, used)
        default_score = str(roles.head.score)
        by_default = (default_score, *(() if predictor.is_fitted else _ZERO_SHOT_SCORES))
        for score in dict.fromkeys(score_names or by_default):
            if score == "weighted" and roles.head.weights is None:
                log.info(f"{predictor.name} has no learned weights: the score weighted is left out")
                continue
            # A joined context is a single utterance.
            scored, turn_score = (joined, "bi") if score == JOINED else (queries, score)
            ranks = rank_next(scored, roles.with_score(turn_score).scores)
            median_rank = float(np.median(ranks.resolve_ties(scoring.ties)))
            about = {"score": score, "candidates": pool, "median_rank": median_rank}
            suffix = "" if score == default_score else f" {score}"
            scoring.add(predictor, suffix, ("score", score), about, ranks)
    if not scoring.results:
        raise UserError(
            "no head can be scored: the score weighted needs a head with learned weights. Fit one: "
            f"llmcond fit-head --head weighted --run {run.folder}"
        )
    return scoring.finish(queries, metrics, "by_history")


def _log_queries(queries: Sequence[NextQueries], scoring: _Scoring, pool: str) -> None:
    n = sum(len(subset.dialogue) for subset in queries)
    n_repeated = sum(int(subset.repeated.sum()) for subset in queries)
    log.info(f"ranking {n:,} next turns of {scoring.split} (candidates: {pool})")
    if n_repeated:
        log.info(
            f"{n_repeated:,} correct answers have the text of another candidate; ties: "
            f"{scoring.ties}"
        )
    if any(subset.history == 1 for subset in queries):
        log.info(
            "a single turn has no pairs: after it, every score equals bi, or the learned weights"
        )


def evaluate_plans(run: Run, options: EvaluateOptions) -> Evaluation:
    """Rank turns by how well they lead to a later turn, with and without knowledge of that goal.

    Options and errors are those of ``AnyTask.evaluate``.
    """
    for score in options.score:
        if score not in _PLANNING_SCORES:
            raise UserError(
                f"--score {score} is for ranking next turns. Planning has the scores average "
                "(equation 4, the default) and bi (the candidate alone). Name one, or both."
            )
    histories = _parse_numbers(options.history, "--history") or PLAN_HISTORIES
    distances = _parse_numbers(options.distance, "--distance") or PLAN_DISTANCES
    scoring = _Scoring(run, options)
    split_key, pool_name = scoring.split_key, options.generate or str(options.plan)
    pool: CandidatePoolFunction
    if options.generate is not None or options.plan not in _PLANNING_POOLS:
        source = Path(pool_name)
        if options.generate is None:
            _check_pool("--plan", pool_name, _PLANNING_POOLS, "a file of samples (.jsonl)")
        else:
            samples = 100 if options.samples is None else options.samples
            turns = resolve_histories(scoring.data, split_key, histories)
            source = generate(run, options.generate, split_key, turns, samples, options.device)
        pool = read_samples(str(source), scoring.data, split_key)
        examples = scoring.examples(pool.extra_texts)
    else:
        examples = scoring.examples()
        pool = RandomPool(same_depth=options.plan == "same-depth")
        if options.plan == "retrieved":
            # Candidates are retrieved by the features alone, so that all heads rank the same ones.
            view = run.zero_shot_views(scoring.prompts[0])[0]
            pool = RetrievedPool(examples.features(view))
    queries = plan_queries(scoring.data, split_key, pool, histories, distances)
    used = _used_texts(array for q in queries for array in (q.contexts, q.candidates, q.goals))
    n = sum(len(subset.dialogue) for subset in queries)
    log.info(f"planning {n:,} turns of {scoring.split} (candidates: {pool_name})")
    for predictor in scoring.predictors:
        roles = examples.roles(predictor, used)
        systems = {
            "average": ("plan", "", "known", roles.score_plans),
            "bi": ("plan-bi", " bi", "known, without context", roles.score_steps),
        }
        for score, suffix, goal, scorer in (
            (str(roles.head.score), " no goal", "context only", roles.score_next_turns),
            *(systems[name] for name in dict.fromkeys(options.score or ("average",))),
        ):
            about = {"score": score, "plan": pool_name, "goal": goal != "context only"}
            ranks = rank_plans(queries, scorer)
            scoring.add(predictor, suffix, ("goal", goal), about, ranks)
    return scoring.finish(queries, PLAN_METRICS, "cells")


class _Scoring:
    """The data and the predictors of an evaluation, with the results so far.

    Attributes:
        data: dataset with the dialogues that are scored.
        split_key: key of their split in ``data``.
        split: name of the split in results.
        ties: rank of an answer among candidates with the same score.
        prompts: prompts of zero-shot.
        predictors: zero-shot with each prompt, followed by heads.
        results: results of systems, without metrics.
    """

    data: Dialogues

    def __init__(self, run: Run, options: EvaluateOptions) -> None:
        """Resolve the options; raise a UserError if heads or dialogues do not exist."""
        self._run, self._device = run, options.device
        self.predictors, self.prompts = resolve_predictors(run, options.head)
        self.ties: Ties = options.ties or "realistic"
        self.data, self.split_key, self.split = read_ranked_data(run, options)
        self.results: list[Result] = []
        self._ranks: list[Floats] = []

    def examples(self, extra_texts: Sequence[str] = ()) -> DialogueExamples:
        """Return examples with additional texts; features that the run lacks are extracted."""
        texts, store = [*self.data.texts, *extra_texts], None
        if len(texts) > len(self._run.data.texts):
            # All texts, because the store may be another one than the run's.
            inputs = partial(UtteranceInputs, texts)
            store = extract_other_data(self._run, self.prompts, inputs, self._device)
        return DialogueExamples(self._run, self.data, extra_texts, store)

    def add(
        self,
        predictor: AnyPredictor,
        suffix: str,
        variant: tuple[str, str],
        about: Mapping[str, Any],
        ranks: Ranks,
    ) -> None:
        """Add a system, a predictor with one score; ``suffix`` is appended to its name."""
        about = {"ties": self.ties, **about}
        result = result_without_metrics(
            predictor, self.split, self._run.task.name, variant=variant, about=about
        )
        self.results.append(replace(result, name=f"{result.name}{suffix}"))
        self._ranks.append(ranks.resolve_ties(self.ties))

    def finish(
        self,
        queries: Sequence[NextQueries] | Sequence[PlanQueries],
        metrics: Sequence[Metric],
        kind: str,
    ) -> Evaluation:
        """Score all systems on all queries, and on each subset, which results have as ``kind``."""
        masks = {kind: subset_masks(queries)}
        results = score_ranks(self.results, self._ranks, stack_queries(queries), metrics, masks)
        return Evaluation(results, self._ranks, query_rows(self.data, self.split_key, queries))


def _used_texts(positions: Iterable[Positions]) -> Positions:
    """Return the distinct positions in several arrays, in ascending order."""
    return np.unique(np.concatenate([array.reshape(-1) for array in positions]))


def _check_pool(flag: str, pool: str, pool_names: Sequence[str], file: str) -> None:
    """Raise a UserError for a pool that is neither a name nor an existing file."""
    if not expand_home(pool).is_file():
        raise UserError(f"{flag} is {pool!r}; expected {', '.join(pool_names)}, or {file}.")


def _parse_numbers(text: str | int | None, flag: str) -> list[int] | None:
    """Parse ranges and numbers such as ``2-10`` or ``2,5`` into ascending numbers; None for None.

    Raises:
        UserError: The text is invalid, a range is descending, or a number is below 1.
    """
    if text is None:
        return None
    values: set[int] = set()
    for part in str(text).split(","):  # in Python, a single number is natural
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise UserError(f"{flag} is {text!r}; expected a range or numbers: 2-10 or 2,5.")
        low, high = int(match[1]), int(match[2] or match[1])
        if low < 1 or high < low:
            raise UserError(
                f"{flag} is {text!r}; {part.strip()} is not an ascending range that starts at 1 or "
                "above."
            )
        values.update(range(low, high + 1))
    return sorted(values)


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
#: Suffixes of the files of weights, settings and tokenizers, such as merges.txt.
_MODEL_SUFFIXES = (".safetensors", ".json", ".txt", ".model")


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
    digest, sampling = run.manifest["data"]["digest"], (str(_SAMPLING), samples, _SEED)
    device = choose_device(device)
    on_gpu = ["cuda"] * (device != "cpu")  # its random numbers differ from those of a CPU
    identity = json.dumps([digest, split, _identify_model(model), *sampling, *on_gpu])
    path = run.folder / "generated" / f"{digest_text(identity)}.jsonl"
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
    generator = _Generator(model, device)
    # The file is rewritten without an incomplete last line, which an interrupted call leaves.
    complete_lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in done.values()]
    write_text(path, "".join(complete_lines))
    with path.open("a", encoding="utf-8") as stream, ProgressBar("generating") as bar:
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
    folder = expand_home(model)
    if folder.is_dir():
        files = [path for path in folder.iterdir() if path.suffix in _MODEL_SUFFIXES]
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


#: The history length of the paper's figure 8, in which the answer is turn 9.
TURNS_HISTORY = 8
#: The mean over queries.
_MEAN = Metric(
    "difference", lambda values, *_: float(values.mean()), by_row=lambda values: values, factor=1
)


def analyse_dialogues(run: Run, options: AnalyseOptions, analyses: Sequence[str]) -> dict[str, Any]:
    """Compare the similarity of contexts to the answer and to other candidates.

    ``similarity`` has the mean similarities of contexts (table 6), and ``turns`` the difference for
    each turn of contexts of 8 turns (figure 8), also as a figure. Heads that were fitted on single
    utterances are analysed as bi-encoders, and others also with pairs.

    Raises:
        UserError: There is no such head or split, the split has no dialogues of three turns, or an
            analysis is for other tasks.
    """
    split = run.scored_split(options.split)
    predictors, _ = resolve_predictors(run, options.head)
    # Without a second text, a query has no other candidates.
    queries = [
        subset for subset in next_queries(run.data, split) if len(np.unique(subset.candidates)) > 1
    ]
    if not queries:
        raise UserError(
            f"all candidates of {split} have the same text, so there is nothing to compare. Name "
            "another --split, or extract more dialogues."
        )
    examples = DialogueExamples(run)
    used = np.unique(run.data.turns_of(split).utterances)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in analyses}
    for predictor in predictors:
        roles = examples.roles(predictor, used)
        is_bi = not roles.head.is_identity and roles.head.settings.min_context == 1
        for score in ("bi",) if is_bi else ("bi", "average"):
            about = {"name": predictor.name, "score": score}
            if "similarity" in analyses:
                rows["similarity"].append(about | _measure_similarity(roles, queries, score))
            if "turns" in analyses:
                rows["turns"].append(about | _measure_turns(roles, queries, score))
    n = sum(len(subset.dialogue) for subset in queries)
    return {"split": split, "n": n, **rows}


def _answers_and_others(roles: UtteranceRoles, subset: NextQueries) -> tuple[Array, Array]:
    """Return the answers' vectors and the mean vectors of the other candidates, (n, k) each."""
    _, text, count = np.unique(subset.candidates, return_inverse=True, return_counts=True)
    after = roles.after(subset.candidates)
    answers, equal = after[subset.answer], count[text[subset.answer]][:, None]
    others = (after.sum(axis=0) - equal * answers) / (len(after) - equal)
    return answers, others.astype(np.float32)


def _measure_similarity(
    roles: UtteranceRoles, queries: Sequence[NextQueries], score: str
) -> dict[str, Any]:
    """Return the mean similarity of all contexts to their answers and to the other candidates."""
    correct, random = [], []
    for subset in queries:
        answers, others = _answers_and_others(roles, subset)
        vectors = query_vectors(*roles.before(subset.contexts), score)
        vectors /= float(ContextScore.parse(score).coefficients(subset.history).total)
        correct.append((vectors * answers).sum(axis=1))
        random.append((vectors * others).sum(axis=1))
    first, second = (np.concatenate(parts).astype(np.float64) for parts in (correct, random))
    dialogue = np.concatenate([subset.dialogue for subset in queries])
    return {
        "random": float(second.mean()),
        "correct": float(first.mean()),
        **_mean(first - second, dialogue),
    }


def _mean(values: Floats, dialogue: NDArray[np.int64]) -> dict[str, Any]:
    """Return the mean over queries as JSON, with its interval over dialogues."""
    means = bootstrap_metrics([values[None]], np.zeros(len(values)), dialogue, [_MEAN])
    return estimates_json(means.estimates(0))


def _measure_turns(
    roles: UtteranceRoles, queries: Sequence[NextQueries], score: str
) -> dict[str, Any]:
    """Return how much closer each turn of a context is to the answer than to other candidates.

    In pairs, the similarity of a turn is the mean over all pairs that contain it. The contexts have
    8 turns, or as many as the split has if its dialogues are shorter.
    """
    subset = [item for item in queries if item.history <= TURNS_HISTORY][-1]
    answers, others = _answers_and_others(roles, subset)
    direction = torch.from_numpy(answers - others)[..., None]
    b1, b2 = map(torch.from_numpy, roles.before(subset.contexts))
    h = subset.history
    if score == "bi":
        differences = (b2 @ direction)[..., 0] / b2.norm(dim=-1).clamp(min=1e-12)
    else:
        pairs = (b1 @ direction + (b2 @ direction).mT) * inverse_lengths(b1, b2)
        pairs = pairs.triu(1)
        differences = (pairs.sum(dim=2) + pairs.sum(dim=1)) / (h - 1)
    columns = differences.double().numpy().T
    turns = [
        {"turn": turn, **_mean(values, subset.dialogue)} for turn, values in enumerate(columns, 1)
    ]
    return {"history": h, "n": len(subset.dialogue), "turns": turns}
