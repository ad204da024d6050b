"""The workflow that analyses heads."""

import pytest

import llmcond
from llmcond.errors import UserError


@pytest.mark.parametrize("top", [0, 1])
def test_top_limits_listed_examples(fitted, tmp_path, top):
    report = llmcond.analyse(run=fitted, what=["examples"], out=tmp_path, top=top).to_json()
    (head,) = report["examples"]
    for direction in ("better", "worse"):
        assert len(head[direction]) == min(top, head[f"n_{direction}"])
    assert head["n_better"] + head["n_worse"] > 1


def test_negative_top_is_rejected(fitted):
    with pytest.raises(UserError, match=r"--top is -1; it must be at least 0"):
        llmcond.analyse(run=fitted, what=["examples"], top=-1)
