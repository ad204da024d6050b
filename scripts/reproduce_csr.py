"""Reproduce the results of CSR (EMNLP 2024 Findings) for any encoders, next to the paper's figures.

    python scripts/reproduce_csr.py --encoders minilm --data FOLDER --kgc-data FOLDER --out csr.md

The script covers tables 1 (C-STS, trained), 2 (knowledge graphs), 3 (weighting strategies) and 4
(without training), and figure 4 (number of layers with a router). ``llmcond explain`` draws the
token weights of figures 5 to 7. The paper trains all weights of its encoders (``--rank full``);
the default is LoRA. Trained encoders are saved in the run folder, and the same command resumes
where it was interrupted. On a CPU, ``--train-share 4 --kgc-share 16 --epochs 2`` shortens the
trainings.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copyfile
from time import perf_counter, process_time
from typing import Any

import numpy as np
from common import Options
from reproduce import (
    PEARSON,
    SPEARMAN,
    Encoder,
    Figures,
    Measure,
    Paper,
    Row,
    Section,
    Table,
    Value,
    average_figures,
    draw_rows,
    joint_prompt,
    parse_table,
    read_values,
    result_figures,
    run_paper,
)
from reproduce import RatedWork as Work

from llmcond.base.errors import UserError
from llmcond.base.files import write_text
from llmcond.base.output import log
from llmcond.commands.encode import extract
from llmcond.commands.score import evaluate
from llmcond.commands.train import train_lora
from llmcond.data.rows import Rows
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.settings import RELEASED_MODES
from llmcond.encoders.spec import Router
from llmcond.kinds.ranking.graph import read_graph, sample_folder
from llmcond.options.common import Split

# -- the paper ---------------------------------------------------------------------------------

#: Hub name -> name in the paper. The paper pools its encoders by the mean (section 2), and decoders
#: by the last token.
NAMES = {
    "voidism/diffcse-roberta-base-sts": "DiffCSE_base",
    "princeton-nlp/sup-simcse-roberta-large": "SimCSE_large",
    "meta-llama/Llama-2-7b-hf": "Llama2-7B",
    "meta-llama/Meta-Llama-3-8B": "Llama3-8B",
}
POOLINGS = {hub: "last" if "Llama" in name else "mean" for hub, name in NAMES.items()}
#: Encoder, system: Spearman and its deviation, Pearson and its deviation.
_PRINTED_1 = parse_table(
    """
    DiffCSE_base tri 28.9 0.7 27.8 1.2
    DiffCSE_base hyper-cl 33.8 0.1 33.1 0.3
    DiffCSE_base paper 34.1 0.2 34.0 0.6
    SimCSE_large tri 35.3 1.0 35.6 0.9
    SimCSE_large hyper-cl 39.6 0.2 40.0 0.3
    SimCSE_large paper 42.0 0.8 42.7 0.8
    SimCSE_large hidden 39.9 0.2 39.4 0.1
    SimCSE_large heavy 40.5 0.2 39.9 0.2
    DiffCSE_base joint 43.4 0.2 43.5 0.2
    DiffCSE_base bi 43.7 0.2 43.6 0.1
    SimCSE_large joint 47.5 0.1 47.6 0.1
    SimCSE_large bi 47.9 0.2 47.8 0.2
    """,
    4,
)
TABLE_1 = {k: (f"{a} ± {b}", f"{c} ± {d}") for k, (a, b, c, d) in _PRINTED_1.items()}
#: System: MRR, Hits@1, Hits@3.
TABLE_2 = parse_table(
    """
    joint 66.6 58.7 71.7
    concat 33.5 22.6 38.2
    hypernet-full 61.6 50.6 69.0
    csr 66.1 58.1 71.1
    """,
    3,
)
#: Encoder, system: Spearman, Pearson.
TABLE_3 = parse_table(
    """
    SimCSE_large tri 35.3 35.6
    SimCSE_large paper 42.0 42.7
    SimCSE_large random 34.7 34.3
    SimCSE_large only 39.28 38.3
    """,
    2,
)
#: Encoder, system: Spearman, Pearson. The paper does not name the encoder of its first two rows,
#: which is that of all its other analyses.
TABLE_4 = parse_table(
    """
    SimCSE_large unconditional 3.4 3.1
    SimCSE_large csr 5.5 5.5
    Llama2-7B joint 1.9 0.4
    Llama3-8B joint 2.9 0.6
    """,
    2,
)
EMBEDDING_API = ("Text-embedding-3 (large)", ("5.6", "6.0"))
#: Rounds of each timing, of which the fastest counts.
ROUNDS = 2

# -- trained encoders --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class System:
    """A way to train an encoder.

    Attributes:
        key: unique name, for the folder of the run.
        label: what the tables call it.
        head: recipe of the head.
        prompt: prompt of the texts; empty for the one of joint texts.
        router: settings of the router.
        notes: differences from the paper.
    """

    key: str
    label: str
    head: str = "none"
    prompt: str = "routed"
    router: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def routed(cls, label: str, mode: str, layers: int, weight: str = "one-plus") -> System:
        """Return an encoder with a router."""
        router = {"router_mode": mode, "router_weight": weight, "router_layers": layers}
        notes = ["not in the paper, but in its code"] if mode in RELEASED_MODES else []
        key = f"{mode}-{layers}" + (f"-{weight}" if weight != "one-plus" else "")
        return cls(key, label, router={"router": "csr", **router}, notes=notes)


HADAMARD = System("tri", "tri-encoder, Hadamard product", "hadamard", "separate")
#: ``train-lora`` takes no prompt that leaves out the condition, but a router of almost no strength
#: has no effect.
UNCONDITIONAL = System(
    "unconditional",
    "encoder that does not see the condition",
    router={"router": "csr", "router_layers": 2, "router_strength": 1e-9},
    notes=("not in the paper",),
)
UNTRAINED_TRI = System("tri-encoder", "tri-encoder", prompt="control-no-condition")
JOINT = System("joint", "bi-encoder", prompt="")
RELEASED = "as in the authors' code"


def training_settings(work: Work) -> dict[str, Any]:
    """Return the settings of every training."""
    options = work.options
    rank = 0 if options.rank == "full" else int(options.rank)
    return {"epochs": 2 if options.quick else options.epochs, "rank": rank}


def score_trained(work: Work, encoder: Encoder, system: System) -> Figures:
    """Return the figures of a trained encoder over seeds, or the reason why there are none."""
    share = work.options.train_share
    splits = dict(work.dataset.splits)
    splits["train"] = take_pairs(splits["train"], share)
    data = in_memory(splits)
    return train(work, encoder, system, f"share{share}", work.split, (SPEARMAN, PEARSON), **data)


def train(
    work: Work,
    encoder: Encoder,
    system: System,
    data_name: str,
    split: str,
    measures: Sequence[Measure],
    **data: Any,
) -> Figures:
    """Train an encoder for each seed, unless that was done before.

    Args:
        work: the command, whose options are used.
        encoder: the encoder.
        system: how to train it.
        data_name: name of the data, for the folder of the run.
        split: the split that is scored.
        measures: the figures to read.
        data: options of the command that say what to train on.

    Returns:
        The figures of the trained encoder over seeds, or the reason why there are none.
    """
    settings = "-".join(f"{name}{value}" for name, value in training_settings(work).items())
    folder = folder_of(encoder, f"{data_name}-{settings}")

    def score(seed: int) -> dict[str, Value]:
        log.info(f"{encoder.name}: {system.label}, {system.key}, seed {seed}")
        result = train_lora(
            run=folder / f"{system.key}-seed{seed}",
            prompt=[system.prompt or joint_prompt(encoder.instructs)],
            head=system.head,
            seed=seed,
            **training_settings(work),
            **data,
            **encoder_options(work, encoder, system.router),
        )
        rows = {row["split"]: row for row in result.to_json()["scores"]}
        return read_values(rows[split], measures)

    if encoder.reason:
        return encoder.missing_reason("")
    key = (str(folder), system.key)
    return work.once(key, lambda: average_figures([score(seed) for seed in range(work.seeds)]))


def score_untrained(
    work: Work, encoder: Encoder, system: System, folder: str, split: Split, **data: Any
) -> Figures:
    """Return the figures of an encoder without training and without subtraction.

    Args:
        work: the command, whose options are used.
        encoder: the encoder.
        system: its prompt and its router.
        folder: name of the folder of the runs.
        split: the split that is scored.
        data: options of the command that say what to score.
    """
    prompt = system.prompt or joint_prompt(encoder.instructs)
    run = folder_of(encoder, folder) / (system.key if system.router else "unrouted")

    def score() -> Figures:
        options = encoder_options(work, encoder, system.router)
        extract(run=run, prompt=[prompt], **data, **options)
        results = evaluate(run=run, head=["none"], split=split)
        return result_figures(next(r for r in results if r.prompt == prompt and not r.subtract))

    return encoder.missing_reason("") if encoder.reason else work.once((str(run), prompt), score)


def score_untrained_rows(work: Work, encoder: Encoder, system: System) -> Figures:
    """Return the figures of an encoder on the scored rows without training."""
    # Train is not needed, but a dataset must have it.
    train = work.dataset.splits["train"]
    splits = {"train": take_pairs(train, len(train)), "dev": work.dataset.splits[work.split]}
    return score_untrained(work, encoder, system, "untrained", "dev", **in_memory(splits))


def settings_notes(work: Work) -> list[str]:
    """Return how the settings of every training differ from the paper's, in words."""
    rank = training_settings(work)["rank"]
    return [f"LoRA of rank {rank} instead of all weights"] if rank else []


def training_notes(work: Work, encoder: Encoder) -> list[str]:
    """Return how the training of an encoder differs from the paper's, in words."""
    options, settings = work.options, training_settings(work)
    notes = [*work.differences(encoder), *settings_notes(work)]
    if options.train_share > 1:
        notes.append(f"1/{options.train_share} of train")
    epochs = f"{settings['epochs']} epochs"
    if work.split == "dev":
        epochs += ", of which the scored rows chose one"
    return [*notes, epochs]


def trained_row(work: Work, encoder: Encoder, system: System, key: str, table: Table) -> Row:
    """Return the row of a trained encoder, with the paper's figures of the system ``key``."""
    return Row(
        encoder.name,
        [system.label],
        score_trained(work, encoder, system),
        [*training_notes(work, encoder), *system.notes],
        *work.printed(table, (SPEARMAN, PEARSON), encoder, key),
    )


# -- data and encoders -------------------------------------------------------------------------


def take_pairs(rows: Rows, share: int) -> Rows:
    """Return the rows of every ``share``-th sentence pair."""
    pairs = list(zip(rows.sentence1, rows.sentence2, strict=True))
    numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    return rows.take(np.array([numbers[pair] % share == 0 for pair in pairs]))


def in_memory(splits: Mapping[str, Rows]) -> dict[str, Any]:
    """Return rows as options of a command."""
    data = {
        name: [
            {"sentence1": first, "sentence2": second, "condition": condition, "label": label}
            for first, second, condition, label in zip(
                rows.sentence1,
                rows.sentence2,
                rows.condition,
                np.where(rows.rated, rows.rating, -1.0).tolist(),
                strict=True,
            )
        ]
        for name, rows in splits.items()
    }
    return {"data": data, "rating_range": (0.0, 1.0)}


def encoder_options(
    work: Work, encoder: Encoder, router: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options that load an encoder, with a router or without."""
    router = router or {}
    folders = dict(text.partition("=")[::2] for text in work.options.encoders)
    folder = folders[encoder.name]
    pooling = None if router.get("router_mode") in RELEASED_MODES else encoder.identity.pooling
    return {
        "model": folder or encoder.name,
        "like": encoder.name if folder else None,
        "dtype": work.options.dtype,
        "device": work.options.device,
        "quantize": work.options.quantize,
        "pooling": pooling,
        **router,
    }


def folder_of(encoder: Encoder, name: str) -> Path:
    """Return a folder for runs of an encoder, next to the run of its features."""
    return encoder.run.with_name(f"{encoder.run.name}-csr") / name


# -- tables of C-STS ---------------------------------------------------------------------------


def table_1(work: Work) -> Section:
    """Compute table 1: CSR, its variants and other architectures, trained."""
    rows, layers = [], work.options.router_layers
    for encoder in work.encoders:
        systems = (
            (HADAMARD, "tri"),
            (UNCONDITIONAL, ""),
            (System.routed("CSR", "paper", layers), "paper"),
            (System.routed("Hidden Router", "hidden", layers), "hidden"),
            (System.routed("Heavy Router", "heavy", layers), "heavy"),
            (System.routed(f"CSR, {RELEASED}", "released-tri", layers), ""),
            (JOINT, "joint"),
            (System.routed("bi-encoder, CSR", "bi", layers), "bi"),
            (System.routed(f"bi-encoder, {RELEASED}", "released-bi", layers), ""),
        )
        rows += [trained_row(work, encoder, system, key, TABLE_1) for system, key in systems]
        reason = "not done: hypercl.md has a frozen encoder with this head"
        paper = work.printed(TABLE_1, (SPEARMAN, PEARSON), encoder, "hyper-cl")
        rows.append(Row(encoder.name, ["Hyper-CL"], reason, [], *paper))
    about = [
        f"Our routers are in the last {layers} layers. In the paper's figure 4, 3 are best.",
        "The authors' code differs from the paper: sentences also attend to the condition in all "
        "layers, and the vector is that of the first token (docs/routers.md).",
    ]
    return Section("Table 1", "C-STS", about, ["system"], (SPEARMAN, PEARSON), rows)


def table_3(work: Work) -> Section:
    """Compute table 3: weighting strategies."""
    rows = []
    for encoder in work.encoders:
        rows.append(trained_row(work, encoder, HADAMARD, "tri", TABLE_3))
        for mode, source in (("paper", ""), ("released-tri", f", {RELEASED}")):
            for label, weight, key in (
                ("CSR: 1 + w", "one-plus", "paper"),
                ("Random Weight", "random", "random"),
                ("Only Weight: w", "only", "only"),
            ):
                system = System.routed(label + source, mode, work.options.router_layers, weight)
                rows.append(trained_row(work, encoder, system, key, TABLE_3))
    about = [
        "Random Weight is 1 + w, in which w is a softmax of normal scores. The sentence's token "
        "ids are their seed, so they depend on neither the condition nor the batch.",
        "The paper does not describe its random weights.",
        "In the form of the paper's section 2, an encoder with random weights cannot see the "
        "condition. In the authors' code it can, because sentences attend to the condition.",
    ]
    return Section("Table 3", "weighting strategies", about, ["system"], (SPEARMAN, PEARSON), rows)


def table_4(work: Work) -> Section:
    """Compute table 4: encoders without training."""
    layers = work.options.router_layers
    systems = (
        (UNTRAINED_TRI, "unconditional"),
        (System.routed("CSR, 1 layer", "paper", 1), "csr"),
        (System.routed(f"CSR, {layers} layers", "paper", layers), "csr"),
        (JOINT, "joint"),
        (System.routed("bi-encoder, CSR", "bi", layers), ""),
        (System.routed(f"CSR, {RELEASED}", "released-tri", layers), ""),
    )
    rows = []
    for encoder in work.encoders:
        for system, key in systems:
            notes = work.differences(encoder) + ([] if key else ["not in the paper's table"])
            ours = score_untrained_rows(work, encoder, system)
            paper = work.printed(TABLE_4, (SPEARMAN, PEARSON), encoder, key)
            rows.append(Row(encoder.name, [system.label], ours, notes, *paper))
    name, figures = EMBEDDING_API
    printed = dict(zip((SPEARMAN.key, PEARSON.key), figures, strict=True))
    reason = "not done: it is available through an API only"
    rows.append(Row(name, [JOINT.label], reason, [], printed))
    about = [
        "Without training, the tri-encoder compares e(s1) and e(s2), which do not depend on the "
        "condition. The paper does not say what its baseline compares.",
        "Nothing is subtracted. Llama2-7B and Llama3-8B can be passed to `--encoders`.",
    ]
    return Section("Table 4", "without training", about, ["system"], (SPEARMAN, PEARSON), rows)


# -- figure 4 ----------------------------------------------------------------------------------

UNTRAINED = Measure("untrained", "Spearman, untrained")
TRAINED = Measure("trained", "Spearman, trained")
SECONDS = Measure("seconds", "seconds", 1, 2)


def figure_4(work: Work) -> Section:
    """Compute figure 4: score and time by the number of layers with a router."""
    rows, curves = [], []
    for encoder in work.encoders:
        scores: dict[str, dict[str, Value]] = {UNTRAINED.key: {}, TRAINED.key: {}}
        for layers in (*work.options.layers, None):
            label = "bi-encoder" if layers is None else str(layers)
            figures, notes = score_layers(work, encoder, layers)
            rows.append(Row(encoder.name, [label], figures, notes))
            for key, of_key in scores.items() if layers is not None else ():
                if not isinstance(figures, str) and key in figures:
                    of_key[label] = figures[key]
        curves += [Row(encoder.name, [key], of_key) for key, of_key in scores.items()]
    about = [
        "The paper shows curves and no numbers. It trains all encoders of part (a).",
        f"Seconds are the time to encode the scored rows, the fastest of {ROUNDS} rounds; on a "
        "CPU, processor seconds.",
        "Each distinct text is encoded once, as in the paper's online setting. Layers before the "
        "router are computed once per sentence.",
        "The paper's offline setting is not done: llmcond does not store keys and queries.",
        "With 0 layers, the sentences are encoded without a router, and the conditions are encoded "
        "for the time of a tri-encoder.",
    ]
    title, measures = "number of layers with a router", (UNTRAINED, TRAINED, SECONDS)
    section = Section("Figure 4", title, about, ["layers"], measures, rows)
    points = [Measure(str(layers), str(layers)) for layers in work.options.layers]
    chart = replace(section, measures=points, rows=curves)
    picture = draw_rows(work, chart, "layers with a router", "Spearman x 100")
    return replace(section, figure=picture.figure)


def score_layers(work: Work, encoder: Encoder, layers: int | None) -> tuple[Figures, list[str]]:
    """Return the figures and notes for a number of routed layers; None is the bi-encoder."""
    system = System.routed("CSR", "paper", layers) if layers else UNTRAINED_TRI
    system = JOINT if layers is None else system
    untrained = score_untrained_rows(work, encoder, system)
    if isinstance(untrained, str):
        return untrained, []
    seconds = _time_encoding(work, encoder, system)
    figures = {UNTRAINED.key: untrained[SPEARMAN.key], SECONDS.key: Value(seconds)}
    trained_layers = work.options.trained_layers
    if trained_layers is not None and layers not in trained_layers:
        return figures, [*work.differences(encoder), "not trained"]
    trained = score_trained(work, encoder, UNCONDITIONAL if layers == 0 else system)
    if isinstance(trained, str):
        return figures, [*work.differences(encoder), trained]
    return {**figures, TRAINED.key: trained[SPEARMAN.key]}, training_notes(work, encoder)


def _time_encoding(work: Work, encoder: Encoder, system: System) -> float:
    """Return the seconds to encode the scored rows with an untrained encoder."""
    rows = work.dataset.splits[work.split]
    sentences = [*rows.sentence1, *rows.sentence2]
    texts = dict.fromkeys(zip(sentences, 2 * list(rows.condition), strict=True))
    if system.router:
        inputs = [EncoderInput("", s, router=Router(c, 1.0, False, False)) for s, c in texts]
    elif system is JOINT:
        inputs = [EncoderInput("", f"{sentence} {condition}") for sentence, condition in texts]
    else:
        inputs = [EncoderInput("", text) for text in dict.fromkeys([*sentences, *rows.condition])]
    options = encoder_options(work, encoder, system.router)
    loaded = load_encoder(options.pop("model"), **options)
    # On a CPU, other work must not count.
    clock = process_time if loaded.resolved.device == "cpu" else perf_counter
    seconds = []
    for _ in range(1 if work.options.quick else ROUNDS):
        start = clock()
        loaded.encode(inputs)
        seconds.append(clock() - start)
    return min(seconds)


# -- knowledge graphs --------------------------------------------------------------------------

RANKED = (Measure.of("mrr"), Measure.of("hits@1"), Measure.of("hits@3"))


def table_2(work: Work) -> Section:
    """Compute table 2: knowledge graphs."""
    options, layers = work.options, work.options.router_layers
    csr = System.routed(f"CSR, {layers} layers (tri-encoder)", "paper", layers)
    folder = f"{Path(options.kgc_data or 'sample').name}-share{options.kgc_share}"
    source, rows = work.once("graph", lambda: {"data": find_graph(work)}), []

    def score(encoder: Encoder, system: System, is_trained: bool) -> Figures:
        if isinstance(source, str):
            return source
        data: dict[str, Any] = {"task": "kgc", **source}
        if is_trained:
            return train(work, encoder, system, folder, "test", RANKED, **data)
        return score_untrained(work, encoder, system, folder, "test", **data)

    trained = [*settings_notes(work), f"{training_settings(work)['epochs']} epochs"]
    for encoder in work.encoders:
        notes = [] if encoder.repo in NAMES else ["other encoder"]
        if options.kgc_share > 1:
            notes.append(f"1/{options.kgc_share} of the triples of each split")
        for system, key in (
            (JOINT, "joint"),
            (System("concat", "tri-encoder, concatenation", "concat", "separate"), "concat"),
            (
                System("full", "Hyper-CL (tri-encoder)", "hypernet-full", "separate"),
                "hypernet-full",
            ),
            (csr, "csr"),
        ):
            ours = score(encoder, system, True)
            printed = dict(zip((m.key for m in RANKED), TABLE_2[key,], strict=True))
            rows.append(Row(encoder.name, [system.label], ours, [*notes, *trained], printed))
        head = System("head", "head entity without the relation", prompt="separate")
        for system in (JOINT, head, csr):
            ours = score(encoder, system, False)
            label = f"{system.label}, not trained"
            rows.append(Row(encoder.name, [label], ours, [*notes, "not in the paper"]))
    name = Path(options.kgc_data).name if options.kgc_data else "the bundled sample graph"
    about = [
        f"Graph: {name}; the paper's is WN18RR. The epoch is chosen on a sample of dev.",
        "Figures are of test, filtered, with realistic ranks, and averaged over both directions.",
        "The paper trains BERT-base as SimKGC does; `train-lora --task kgc` has SimKGC's "
        "objective, without its queue of earlier batches.",
        "Intervals cover the error of head and tail entities and, with several fits, of seeds. "
        f"Seeds: {work.seeds}.",
        "The head is a candidate of its own query. Hits@1 is near 0 where an encoder still ranks "
        "it first.",
    ]
    if options.kgc_share > 1:
        about.append(
            "All entities are candidates. Only answers in the part of the graph are filtered, so "
            "the figures are lower than with the whole graph."
        )
    return Section("Table 2", "knowledge graphs", about, ["system"], RANKED, rows)


def find_graph(work: Work) -> str | None:
    """Return the folder of the graph, or of the requested share of its triples.

    Raises:
        UserError: the graph cannot be read, or has no test triples.
    """
    source: str | None = work.options.kgc_data
    share: int = work.options.kgc_share
    if not len(read_graph(source).splits.get("test", ())):
        raise UserError("the graph has no test triples. Add test.txt to its folder.")
    if share == 1:
        return source
    folder = Path(source) if source else sample_folder()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder, which --kgc-share needs.")
    part = work.options.folder / f"{folder.name}-share{share}"
    part.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.stem in ("train", "valid", "dev", "test"):
            lines = path.read_text("utf-8").splitlines(keepends=True)
            write_text(part / path.name, "".join(lines[::share]))
        elif path.is_file():
            copyfile(path, part / path.name)
    return str(part)


# -- the command -------------------------------------------------------------------------------


def about(work: Work) -> list[str]:
    """Return the notes on all tables."""
    return [
        *work.data_notes("The paper trains on the original C-STS and scores its hidden test set."),
        "The paper trains all weights of its encoders, and averages three runs. Ours are trained "
        "by `llmcond train-lora` with its default settings, squared error, and the number of "
        "epochs and rows that each row of a table names.",
        "Figures 5 to 7 show the weights of tokens in one sentence. `llmcond explain` draws them "
        "for a run of an encoder with a router, or without one.",
    ]


def _rank(text: str) -> str:
    if text != "full":
        _count(text)
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_options(parser: Options) -> None:
    """Add the options that only this script has."""
    add = parser.option
    count: dict[str, Any] = {"type": _count}
    add("--epochs", 4, "epochs of each training", **count)
    add("--rank", "16", "rank of LoRA, or full to train all weights as in the paper", type=_rank)
    count |= {"metavar": "N"}
    add("--train-share", 1, "train on every N-th sentence pair only", **count)
    add("--router-layers", 3, "number of layers with a router in all tables", **count)
    layers = "numbers of layers with a router in figure 4"
    add("--layers", list(range(7)), layers, "0 to 6", metavar="N")
    trained = "those of --layers for which an encoder is trained"
    add("--trained-layers", int, trained, "all", nargs="*", metavar="N")
    graph = "folder of a knowledge graph for table 2"
    add("--kgc-data", str, graph, "the bundled sample graph", metavar="FOLDER")
    add("--kgc-share", 1, "use every N-th triple of the graph only", **count)


PAPER = Paper(
    name="CSR",
    doc=__doc__,
    script="reproduce_csr.py",
    names=NAMES,
    poolings=POOLINGS,
    prompts=lambda instructs: [UNTRAINED_TRI.prompt],
    sections={"1": table_1, "2": table_2, "3": table_3, "4": table_4, "figure4": figure_4},
    about=about,
    options=add_options,
)

if __name__ == "__main__":
    sys.exit(run_paper(PAPER))
