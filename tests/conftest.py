"""Shared fixtures: a real small encoder, checkpoints with random weights, and small datasets."""

import csv
import gc
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from llmcond.base.output import log_to_terminal
from llmcond.base.system import cpu_features, is_installed
from llmcond.encoders.encoder import Encoder, load_encoder
from llmcond.encoders.spec import import_openvino

#: Networks with more bytes are compiled each time, because hashing their weights takes as long.
_MAX_CACHED_BYTES = 2**20
#: The marks of tests that run only with an option.
_SELECTED_BY = {"--all": ("slow", "programs"), "--weights": ("weights",)}
WORDS = (
    "a the two three men women children dogs ride play read sit walk in on at park beach kitchen "
    "street red blue green hat coat morning night happy sad rain sun colour number of people "
    "activity place time mood instruct query retrieve : . ,"
).split()


def pytest_configure() -> None:
    """Set signals, threads, messages and the width of tables for all tests.

    A process that a shell starts in the background ignores interrupts, and so do its children.
    """
    os.environ.pop("COLUMNS", None)
    # The first command of a process turns messages on. Tests must not depend on their order.
    log_to_terminal()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several workers would wait for each other
        import torch

        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start
    # With Ray's default niceness, its workers would yield to all other tests and finish last.
    os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_report_header() -> str:
    """Name the processor's features that results depend on, and how it is simulated."""
    simulating = ("LLMCOND_CPU_FEATURES", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    simulated = [f"{name}={os.environ[name]}" for name in simulating if name in os.environ]
    kinds = ("avx", "amx", "bf16", "sve", "asimd")
    features = sorted(name for name in cpu_features() if name.startswith(kinds))
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return f"processor: {' '.join([*features, *simulated])}; OMP_NUM_THREADS {threads}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that run tests which are otherwise deselected."""
    for option, marks in _SELECTED_BY.items():
        selected = " and ".join(marks)
        parser.addoption(option, action="store_true", help=f"run also tests marked {selected}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with the marks of ``_SELECTED_BY``, unless they are requested or named."""
    if any("::" in argument for argument in config.args):
        return
    left_out = [
        mark
        for option, marks in _SELECTED_BY.items()
        for mark in marks
        if not config.getoption(option)
    ]
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in set(deselected)]


def pytest_collection_finish() -> None:
    """Start the server that forks the processes of tests, and freeze what is imported."""
    if "helpers.processes" in sys.modules:
        # llmcond itself would start the server with fewer imports.
        forkserver.ensure_running()
    # Nearly every worker needs these libraries, so they are imported before the freeze.
    if "PYTEST_XDIST_WORKER" in os.environ:
        for name in ("hypothesis", "lance", "peft", "sklearn", "transformers.trainer"):
            import_module(name)
        if is_installed("openvino"):
            import_openvino()
    # Modules stay in memory. Searching them for garbage again and again took a tenth of the time.
    gc.collect()
    gc.freeze()


@pytest.fixture
def native_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let encoders compute in bfloat16 and float16 on any CPU, which emulates what it lacks."""
    monkeypatch.setenv("LLMCOND_CPU_FEATURES", "avx512_bf16 avx512_fp16")


@pytest.fixture(autouse=True)
def check_flags_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if an error names a flag that the command does not have."""
    from helpers.flags import unknown_flags

    from llmcond import cli

    run_command, print_error = cli._run, cli._print_error

    def run_checked(arguments: Sequence[str], signals: Sequence[int]) -> int:
        def print_checked(text: str, code: int) -> int:
            unknown = unknown_flags(arguments, text)
            assert not unknown, f"{arguments[0]} has no {unknown[0]}: {text}"
            return print_error(text, code)

        with monkeypatch.context() as context:
            context.setattr(cli, "_print_error", print_checked)
            return run_command(arguments, signals)

    monkeypatch.setattr(cli, "_run", run_checked)


@pytest.fixture(scope="module", autouse=True)
def compile_networks_once(
    request: pytest.FixtureRequest, _compiled: dict[bytes, Any]
) -> Iterator[None]:
    """Compile each small network with OpenVINO only once per process.

    Every command loads its encoder again, and compiling the tiny networks of the tests each time
    took a twentieth of the processor time of all tests. Tests of OpenVINO itself are excluded.
    """
    from llmcond.encoders.openvino import engine

    compile_network = engine.compile_network

    def compile_once(tensors: Mapping[str, Any], *settings: Mapping[str, Any]) -> Any:
        if sum(tensor.nbytes for tensor in tensors.values()) > _MAX_CACHED_BYTES:
            return compile_network(tensors, *settings)
        digest = hashlib.sha256(json.dumps(settings).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(f"{name}{tensor.shape}{tensor.dtype}".encode() + tensor.tobytes())
        key = digest.digest()
        if key not in _compiled:
            _compiled[key] = compile_network(tensors, *settings)
        return _compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        if "openvino" not in request.path.parts:
            patch.setattr(engine, "compile_network", compile_once)
        yield


@pytest.fixture(scope="session")
def _compiled() -> dict[bytes, Any]:
    """Compiled networks by a digest of their weights and settings."""
    return {}


@contextmanager
def _threads(n_threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run PyTorch with one thread in all tests of a module."""
    with _threads(1):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Run PyTorch with two threads in one test, whatever the number of cores."""
    with _threads(2):
        yield


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder, so that runs/default belongs to it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    """The real all-MiniLM-L6-v2, in float32 on the CPU."""
    return load_encoder("minilm", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """An installed Chromium or Chrome."""
    library = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    executable = next(filter(None, map(shutil.which, names)), None)
    if executable is None:
        pytest.skip("no Chromium or Chrome is installed")
    with library.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=executable)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of real checkpoints with random weights: a small BERT or a small Mistral.

    Each call returns a new folder, which a test may change.
    """

    @cache
    def build(kind: str, seed: int, hidden: int, layers: int) -> Path:
        import torch
        import transformers
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

        torch.manual_seed(seed)
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        vocabulary = {token: i for i, token in enumerate([*special, *dict.fromkeys(WORDS)])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=64,
            **{f"{name}_token": token for name, token in names.items()},
        )
        shape = {
            "vocab_size": len(vocabulary),
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        }
        if kind == "bert":
            config = transformers.BertConfig(**shape)
            model = transformers.BertModel(config, add_pooling_layer=False)
        else:
            config = transformers.MistralConfig(**shape, num_key_value_heads=2)
            model = transformers.MistralModel(config)
        folder = tmp_path_factory.mktemp(kind)
        model.save_pretrained(folder)
        fast.save_pretrained(folder)
        return folder

    def make(kind: str = "bert", seed: int = 0, hidden: int = 32, layers: int = 2) -> Path:
        built = build(kind, seed, hidden, layers)
        return Path(shutil.copytree(built, tmp_path_factory.mktemp(kind), dirs_exist_ok=True))

    return make


@pytest.fixture(scope="session")
def real_checkpoint() -> Callable[[str], Path]:
    """A function that returns the folder of a real encoder, or skips the test without one.

    Tests that use it have the mark ``weights``.
    """
    from fetch_encoders import encoders_folder

    def find(name: str) -> Path:
        folder = encoders_folder() / name
        if not (folder / "config.json").is_file():
            pytest.skip(f"{folder} does not exist: call scripts/fetch_encoders.py {name}")
        return folder

    return find


@pytest.fixture(scope="session")
def tiny_bert(tiny_checkpoint: Callable[..., Path]) -> Path:
    """A small random BERT with two layers. Copy it before changing it."""
    return tiny_checkpoint()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a server with the S3 protocol and one bucket, ``features``."""
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/features", method="PUT")
    urllib.request.urlopen(request).close()
    yield port
    server.stop()


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URI of a folder in a bucket for one test, whose environment variables are set."""
    from helpers.buckets import s3_environment

    for name, value in s3_environment(s3_port).items():
        monkeypatch.setenv(name, value)
    return f"s3://features/{tmp_path.name}"


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes CSV files with the standard columns."""

    def write(
        rows: list[tuple[object, ...]], name: str = "rows.csv", header: str | None = None
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            writer.writerow((header or "sentence1,sentence2,condition,label").split(","))
            writer.writerows(rows)
        return path

    return write


@pytest.fixture(scope="session")
def small_rows() -> list[tuple[str, str, str, int]]:
    """Forty sentence pairs under two conditions each, with opposite ratings."""
    people = ["two men", "three women", "children", "two dogs"]
    locations = ["in the park", "at the beach", "in the kitchen", "on the street", "in the rain"]
    rows: list[tuple[str, str, str, int]] = []
    for i in range(40):
        first = f"{people[i % 4]} play {locations[i % 5]} number {i}"
        second = f"{people[(i + i // 4) % 4]} sit {locations[(i + i // 5) % 5]} number {i}"
        rating = 1 + i % 5
        rows.append((first, second, "the number of people", rating))
        rows.append((first, second, "the place", 6 - rating))
    return rows


@pytest.fixture(scope="session")
def tiny_run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_bert: Path,
    small_rows: list[tuple[str, str, str, int]],
) -> Path:
    """A run with features from a tiny random encoder. Copy it before changing it."""
    from helpers.commands import write_pairs

    from llmcond import extract

    folder = tmp_path_factory.mktemp("runs")
    data = write_pairs(folder / "rows.csv", small_rows)
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    options |= {"model": str(tiny_bert), "data": str(data), "prompt": ["concat-sent-cond"]}
    extract(run=folder / "run", **options)
    return folder / "run"


@pytest.fixture
def run_copy(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the tiny run, which a test may change."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run_copy"))


@pytest.fixture(scope="session")
def dialogue_run(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    """A dialogue run with a tiny random encoder and two heads. Copy it before changing it."""
    from helpers.dialogues import write_dialogues

    from llmcond import extract, fit_head

    folder = tmp_path_factory.mktemp("dialogues")
    data = str(write_dialogues(folder / "data"))
    options = {"dtype": "float32", "device": "cpu", "pooling": "mean", "normalize": True}
    extract(model=str(tiny_bert), **options, run=folder / "run", data=data, task="dialogue")
    for head in ("rank", "weighted"):
        fit_head(run=folder / "run", head=head, set={"epochs": "2", "batch_size": "64"})
    return folder / "run"


@pytest.fixture(scope="session")
def model(tiny_bert: Path) -> str:
    """The folder of the small random BERT, as a value of ``--model``."""
    return str(tiny_bert)


@pytest.fixture
def data(write_rows: Callable[..., Path], small_rows: list[tuple[str, str, str, int]]) -> Path:
    """The forty pairs in a CSV file."""
    return write_rows(small_rows)


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small knowledge graph."""
    from helpers.graphs import write_graph

    return write_graph(tmp_path_factory.mktemp("graph") / "graph")


@pytest.fixture(scope="session")
def embedder(tiny_run: Path) -> Any:
    """An embedder from the tiny run, for tests that do not change it."""
    from llmcond.runs.embedder import load_embedder

    return load_embedder(tiny_run, device="cpu")


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """The tiny run with a linear head. Copy it before changing it."""
    from llmcond import fit_head

    folder = tmp_path_factory.mktemp("fitted") / "run"
    shutil.copytree(tiny_run, folder)
    fit_head(run=folder, head="linear", set={"epochs": "2"}, device="cpu")
    return folder


@pytest.fixture(scope="session")
def heads_run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_checkpoint: Callable[..., Path],
    small_rows: list[tuple[str, str, str, int]],
) -> Path:
    """A run with every kind of head that an index supports (``helpers.heads.fit_all``)."""
    from helpers.heads import fit_all_heads

    return fit_all_heads(tmp_path_factory.mktemp("search"), tiny_checkpoint(), small_rows)


@pytest.fixture(scope="session")
def actors_import_helpers() -> Iterator[None]:
    """Make the helpers of tests importable in processes that Ray starts."""
    before = os.environ.get("PYTHONPATH")
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture(scope="session")
def ray(actors_import_helpers: None) -> Iterator[Any]:
    """The Ray cluster that all tests of a process share."""
    import ray

    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ray.init(num_cpus=3, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    yield ray
    ray.shutdown()
