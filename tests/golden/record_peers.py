"""Compute the figures of peers.json again, from the inputs in it, in another environment.

pip install pykeen==1.11.1 arch==8.0.0 statsmodels==0.15.0; python tests/golden/record_peers.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import statsmodels.api as sm
import torch
from arch.bootstrap import IIDBootstrap
from pykeen.evaluation import RankBasedEvaluator
from scipy.stats import pearsonr, spearmanr
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.sandwich_covariance import cov_cluster_2groups

PEERS = Path(__file__).with_name("peers.json")
TIES = ("realistic", "optimistic", "pessimistic")
#: The names of PyKEEN for the metrics and the directions of llmcond.
METRICS = {"mrr": "inverse_harmonic_mean_rank", "mean_rank": "arithmetic_mean_rank"} | {
    f"hits@{k}": f"hits_at_{k}" for k in (1, 3, 5, 10)
}
SIDES = {"forward": "tail", "backward": "head", "both": "both"}
SAMPLES = 60


def pykeen_figures(case):
    """The first half of the queries asks for tails, the second half for heads."""
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
    results, ranks, metrics = evaluator.finalize(), {}, {side: {} for side in SIDES}
    for ties in TIES:
        batches = [rank for side in ("tail", "head") for rank in evaluator.ranks[side, ties]]
        ranks[ties] = np.concatenate(batches).tolist()
        for ours, side in SIDES.items():
            metrics[ours][ties] = {
                name: float(results.get_metric(f"{side}.{ties}.{theirs}"))
                for name, theirs in METRICS.items()
            }
    return {"ranks": ranks, "metrics": metrics}


def arch_figures(rows):
    """Resample sentence pairs, and correlate both systems with the ratings of each sample."""
    columns = {name: np.array(values) for name, values in rows.items()}
    n_pairs = int(columns["pair"].max()) + 1
    members = [np.flatnonzero(columns["pair"] == pair) for pair in range(n_pairs)]

    def correlations(pairs):
        sampled = np.concatenate([members[pair] for pair in pairs])
        pair = [columns[name][sampled] for name in ("first", "second")]
        rating = columns["rating"][sampled]
        values = [peer(x, rating).statistic for peer in (spearmanr, pearsonr) for x in pair]
        return np.array(values)

    bootstrap = IIDBootstrap(np.arange(n_pairs), seed=np.random.default_rng(2))
    samples = [data[0][0].tolist() for data in bootstrap.bootstrap(SAMPLES)]
    bootstrap.reset()
    values = bootstrap.apply(correlations, SAMPLES)
    bootstrap.reset()
    # The covariance is around the mean of the samples, divided by their number.
    covariance = bootstrap.cov(correlations, SAMPLES, recenter=True)
    return {"samples": samples, "values": values.tolist(), "covariance": covariance.tolist()}


def statsmodels_figures(inputs):
    """Correct p values as Holm does, and vary a mean with two kinds of clusters."""
    ranks, heads, tails = (np.array(inputs[name]) for name in ("ranks", "heads", "tails"))
    variances = cov_cluster_2groups(sm.OLS(ranks, np.ones(len(ranks))).fit(), heads, tails)
    corrected = [multipletests(p, method="holm")[1].tolist() for p in inputs["p"]]
    return {"holm": corrected, "variance": [float(np.squeeze(each)) for each in variances]}


if __name__ == "__main__":
    record = json.loads(PEERS.read_text(encoding="utf-8"))
    record["versions"] = {name: version(name) for name in ("pykeen", "arch", "statsmodels")}
    for case in record["rankings"].values():
        case["pykeen"] = pykeen_figures(case)
    record["arch"] = arch_figures(record["rows"])
    record["statsmodels"] |= statsmodels_figures(record["statsmodels"])
    PEERS.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
