"""Every check of ``llmcond bench`` on the stand-in for a GPU."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.standin import StandIn

from llmcond.benchmark import checks
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput

#: It starts processes, and has a test of its own.
_OTHER = ("two processes on one device = one",)


def _checks(tmp_path: Path) -> list[tuple[str, float, checks.Measure]]:
    return list(checks._list_checks(checks.CheckEnvironment("cuda:0", tmp_path)))


_NAMES = [name for name, *_ in _checks(Path()) if name not in _OTHER]


@pytest.mark.parametrize("name", _NAMES)
def test_each_check_passes_on_a_gpu(gpu: StandIn, tmp_path: Path, name: str) -> None:
    bound, measure = next((b, m) for n, b, m in _checks(tmp_path) if n == name)

    check = checks.run_check(name, bound, measure)

    assert check.passed, check
    assert gpu.n_launches > 0
    if "16 bit" in name:
        assert check.note == "varlen_attn"


def encode_on_a_gpu(resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]) -> checks.Vectors:
    with StandIn() as gpu:
        vectors = Encoder(resolved).encode_counted(inputs).vectors
        assert gpu.n_launches > 0
    return vectors


def test_two_processes_compute_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_encode", encode_on_a_gpu)
    difference, _ = checks._compare_two_processes(checks.CheckEnvironment("cuda:0", tmp_path))
    assert difference <= checks.BOUNDS["float32"]
