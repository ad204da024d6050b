"""Record figures of PyKEEN, arch and statsmodels, with which llmcond's are compared.

    pip install pykeen==1.11.1 arch==8.0.0 statsmodels==0.15.0    # another environment
    python tests/golden/record_peers.py

``peers.json`` holds random and adversarial inputs, the figures of the peers, and their versions, so
that the tests need none of these packages. This script computes the figures for those inputs again.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

PEERS = Path(__file__).with_name("peers.json")
TIES = ("realistic", "optimistic", "pessimistic")
#: The names of PyKEEN for the metrics of llmcond.
PYKEEN = {"mrr": "inverse_harmonic_mean_rank", "mean_rank": "arithmetic_mean_rank"} | {
    f"hits@{k}": f"hits_at_{k}" for k in (1, 3, 5, 10)
}
#: The sides of PyKEEN: predicted tails, predicted heads, and both.
SIDES = {"tail": "forward", "head": "backward", "both": "both"}
#: Bootstrap samples of the statistics.
SAMPLES = 60


def pykeen_figures(case: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return PyKEEN's ranks by treatment of ties, and its metrics by side and treatment.

    The first half of the queries asks for tails, the second half for heads.
    """
    import torch
    from pykeen.evaluation import RankBasedEvaluator

    scores, answer = np.array(case["scores"], np.float32), np.array(case["answer"])
    left_out = np.array(case["left_out"], bool)
    evaluator = RankBasedEvaluator(clear_on_finalize=False)
    m = len(answer)
    for side, rows in (("tail", slice(0, m // 2)), ("head", slice(m // 2, m))):
        # PyKEEN's filter sets the scores of other known answers to NaN.
        filtered = np.where(left_out[rows], np.nan, scores[rows])
        answers = torch.from_numpy(answer[rows, None])
        answer_scores = torch.from_numpy(scores[rows]).gather(1, answers)
        table = torch.from_numpy(filtered.astype(np.float32)).scatter_(1, answers, answer_scores)
        triples = torch.zeros((len(answers), 3), dtype=torch.int64)
        evaluator.process_scores_(triples, side, table, answer_scores)
    ranks = {
        ties: np.concatenate(
            [np.concatenate(evaluator.ranks[side, ties]) for side in ("tail", "head")]
        ).tolist()
        for ties in TIES
    }
    results = evaluator.finalize()
    metrics = {
        ours: {
            ties: {
                name: float(results.get_metric(f"{side}.{ties}.{theirs}"))
                for name, theirs in PYKEEN.items()
            }
            for ties in TIES
        }
        for side, ours in SIDES.items()
    }
    return {"ranks": ranks, "metrics": metrics}


def arch_figures(rows: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Return arch's bootstrap over sentence pairs: its samples, the metrics on them, and variances.

    The metrics are Spearman's and Pearson's correlation of both systems, by scipy.
    """
    from arch.bootstrap import IIDBootstrap
    from scipy.stats import pearsonr, spearmanr

    columns = {name: np.array(values) for name, values in rows.items()}
    n_pairs = int(columns["pair"].max()) + 1
    members = [np.flatnonzero(columns["pair"] == pair) for pair in range(n_pairs)]

    def correlations(pairs: np.ndarray) -> np.ndarray:
        sampled = np.concatenate([members[pair] for pair in pairs])
        rating = columns["rating"][sampled]
        return np.array(
            [
                correlate(columns[system][sampled], rating).statistic
                for correlate in (spearmanr, pearsonr)
                for system in ("first", "second")
            ]
        )

    bootstrap = IIDBootstrap(np.arange(n_pairs), seed=np.random.default_rng(2))
    samples = [data[0][0].tolist() for data in bootstrap.bootstrap(SAMPLES)]
    bootstrap.reset()
    values = bootstrap.apply(correlations, SAMPLES)
    bootstrap.reset()
    # The covariance is around the mean of the samples, divided by their number.
    covariance = bootstrap.cov(correlations, SAMPLES, recenter=True)
    return {"samples": samples, "values": values.tolist(), "covariance": covariance.tolist()}


def statsmodels_figures(inputs: Mapping[str, Any]) -> dict[str, object]:
    """Return Holm's correction, and the variance of a mean with two kinds of clusters."""
    import statsmodels.api as sm
    from statsmodels.stats.multitest import multipletests
    from statsmodels.stats.sandwich_covariance import cov_cluster_2groups

    ranks, heads, tails = (np.array(inputs[name]) for name in ("ranks", "heads", "tails"))
    variances = cov_cluster_2groups(sm.OLS(ranks, np.ones(len(ranks))).fit(), heads, tails)
    return {
        "holm": [multipletests(p, method="holm")[1].tolist() for p in inputs["p"]],
        "variance": [float(np.squeeze(variance)) for variance in variances],
    }


def main() -> None:
    record = json.loads(PEERS.read_text(encoding="utf-8"))
    record["versions"] = {name: version(name) for name in ("pykeen", "arch", "statsmodels")}
    for case in record["rankings"].values():
        case["pykeen"] = pykeen_figures(case)
    record["arch"] = arch_figures(record["rows"])
    record["statsmodels"] |= statsmodels_figures(record["statsmodels"])
    PEERS.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
