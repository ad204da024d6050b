"""Every check of ``llmcond bench`` on the stand-in for a GPU."""

from pathlib import Path

import pytest
from helpers.standin import StandIn

from llmcond.benchmark import checks

#: It starts processes, which have a test of their own.
_OTHER = ("two processes on one device = one",)


def _checks(tmp_path: Path) -> list[tuple[str, float, checks.Measure]]:
    return list(checks._all(checks.Bench("cuda:0", tmp_path)))


_NAMES = [name for name, *_ in _checks(Path()) if name not in _OTHER]


@pytest.mark.parametrize("name", _NAMES)
def test_each_check_passes_on_a_gpu(gpu: StandIn, tmp_path: Path, name: str) -> None:
    bound, measure = next((b, m) for n, b, m in _checks(tmp_path) if n == name)

    check = checks.run_check(name, bound, lambda: measure(checks.Bench("cuda:0", tmp_path)))

    assert check.passed, check
    assert gpu.n_launches > 0
    if "16 bit" in name:
        assert check.note == "varlen_attn"
