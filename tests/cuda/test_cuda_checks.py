"""All checks of ``llmcond bench``, on the stand-in for a GPU."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.standin import StandIn

from llmcond.benchmark import checks
from llmcond.encoders.encoder import Encoder
from llmcond.encoders.resolve import ResolvedEncoder
from llmcond.encoders.spec import EncoderInput

#: Checks that start processes, which a separate test covers.
_CHECKS_IN_PROCESSES = ("two processes on one device = one",)


def _list_checks(tmp_path: Path) -> list[tuple[str, float, checks.Measure]]:
    return list(checks._list_checks(checks.CheckEnvironment("cuda:0", tmp_path)))


_CHECK_NAMES = [name for name, *_ in _list_checks(Path()) if name not in _CHECKS_IN_PROCESSES]


@pytest.mark.matrix
@pytest.mark.parametrize("name", _CHECK_NAMES)
def test_each_check_passes_on_gpu(gpu: StandIn, tmp_path: Path, name: str) -> None:
    bound, measure = next(
        (bound, measure)
        for check_name, bound, measure in _list_checks(tmp_path)
        if check_name == name
    )

    check = checks.run_check(name, bound, measure)

    assert check.passed, check
    assert gpu.n_launches > 0
    if "16 bit" in name:
        assert check.note == "varlen_attn"


def encode_on_gpu(resolved: ResolvedEncoder, inputs: Sequence[EncoderInput]) -> checks.Vectors:
    with StandIn() as gpu:
        vectors = Encoder(resolved).encode_with_counts(inputs).vectors
        assert gpu.n_launches > 0
    return vectors


def test_two_processes_match_one_process_on_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_encode", encode_on_gpu)
    difference, _ = checks._compare_two_processes(checks.CheckEnvironment("cuda:0", tmp_path))
    assert difference <= checks.BOUNDS["float32"]
