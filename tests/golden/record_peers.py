"""Record figures of PyKEEN, arch and statsmodels, with which llmcond's are compared.

    pip install pykeen==1.11.1 arch==8.0.0 statsmodels==0.15.0    # another environment
    PYTHONPATH=tests/golden python tests/golden/record_peers.py

``peers.json`` holds random and adversarial inputs, the figures of the peers, and their versions, so
that the tests need none of these packages. Record it again if an input changes.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np

PEERS = Path(__file__).with_name("peers.json")
TIES = ("realistic", "optimistic", "pessimistic")
CUTS = (1, 3, 5, 10)
#: The names of PyKEEN for the metrics of llmcond.
PYKEEN = {"mrr": "inverse_harmonic_mean_rank", "mean_rank": "arithmetic_mean_rank"} | {
    f"hits@{k}": f"hits_at_{k}" for k in CUTS
}
#: The sides of PyKEEN: predicted tails, predicted heads, and both.
SIDES = {"tail": "forward", "head": "backward", "both": "both"}
#: Bootstrap samples and sentence pairs of the statistics.
SAMPLES, PAIRS = 60, 15


# -- inputs ------------------------------------------------------------------------------------


def ranking_cases() -> dict[str, dict[str, np.ndarray]]:
    """Return scores (m, n), answers (m,) and masks (m, n) of candidates that are left out.

    The first half of the queries asks for tails, the second half for heads.
    """
    rng = np.random.default_rng(0)

    def case(scores: np.ndarray, left_out: float = 0.2) -> dict[str, np.ndarray]:
        m, n = scores.shape
        answer = rng.integers(n, size=m)
        mask = rng.uniform(size=(m, n)) < left_out
        mask[np.arange(m), answer] = rng.uniform(size=m) < 0.5  # an answer counts nevertheless
        return {"scores": scores.astype(np.float32), "answer": answer, "left_out": mask}

    def distinct(m: int, n: int) -> np.ndarray:
        return rng.permuted(np.tile(np.arange(n) / 8 - 1, (m, 1)), axis=1)

    several = case(distinct(8, 9))
    several["left_out"][::2] = True  # only the answer remains
    return {
        "no ties": case(distinct(12, 15), 0.0),
        "filtered": case(distinct(12, 15)),
        "ties": case(rng.integers(-1, 2, size=(12, 15)).astype(float)),
        "all scores are equal": case(np.zeros((6, 12))),
        "one candidate": case(np.ones((4, 1)), 0.0),
        "only the answer remains": several,
        "zeros of both signs": case(np.array([[0.0, -0.0, 0.0], [-0.0, 0.0, 1.0]])),
        "extreme scores": case(rng.choice([-3e38, -1e-40, 0.0, 1e-40, 3e38], size=(8, 10))),
    }


def rated_rows() -> dict[str, np.ndarray]:
    """Return predictions of two systems, ratings and sentence pairs, with many ties."""
    rng = np.random.default_rng(1)
    pair = np.repeat(np.arange(PAIRS), rng.integers(1, 5, size=PAIRS))
    rating = rng.integers(1, 6, size=len(pair)).astype(float)
    error = rng.standard_normal((2, len(pair))) * np.array([[0.7], [2.0]])
    return {
        "first": (rating + error[0]).round(0),
        "second": (rating + error[1]).round(1),
        "rating": rating,
        "pair": pair,
    }


# -- peers -------------------------------------------------------------------------------------


def pykeen_figures(scores: np.ndarray, answer: np.ndarray, left_out: np.ndarray) -> dict[str, dict]:
    """Return PyKEEN's ranks by treatment of ties, and its metrics by side and treatment."""
    import torch
    from pykeen.evaluation import RankBasedEvaluator

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


def arch_figures(rows: dict[str, np.ndarray]) -> dict[str, object]:
    """Return arch's bootstrap over sentence pairs: its samples, the metrics on them, and variances.

    The metrics are Spearman's and Pearson's correlation of both systems, by scipy.
    """
    from arch.bootstrap import IIDBootstrap
    from scipy.stats import pearsonr, spearmanr

    members = [np.flatnonzero(rows["pair"] == pair) for pair in range(PAIRS)]

    def correlations(pairs: np.ndarray) -> np.ndarray:
        sampled = np.concatenate([members[pair] for pair in pairs])
        rating = rows["rating"][sampled]
        return np.array(
            [
                correlate(rows[system][sampled], rating).statistic
                for correlate in (spearmanr, pearsonr)
                for system in ("first", "second")
            ]
        )

    bootstrap = IIDBootstrap(np.arange(PAIRS), seed=np.random.default_rng(2))
    samples = [data[0][0].tolist() for data in bootstrap.bootstrap(SAMPLES)]
    bootstrap.reset()
    values = bootstrap.apply(correlations, SAMPLES)
    bootstrap.reset()
    # The covariance is around the mean of the samples, divided by their number.
    covariance = bootstrap.cov(correlations, SAMPLES, recenter=True)
    return {"samples": samples, "values": values.tolist(), "covariance": covariance.tolist()}


def statsmodels_figures() -> dict[str, object]:
    """Return Holm's correction, and the variance of a mean with two kinds of clusters."""
    import statsmodels.api as sm
    from statsmodels.stats.multitest import multipletests
    from statsmodels.stats.sandwich_covariance import cov_cluster_2groups

    rng = np.random.default_rng(3)
    families = [
        [0.01, 0.04, 0.03, 0.005],
        [0.5, 0.5, 0.5],
        [0.0, 1.0, 0.049, 0.049, 0.051],
        [0.2],
        rng.uniform(size=12).round(4).tolist(),
    ]
    heads, tails = rng.integers(20, size=(2, 150))
    ranks = (1 + 3 * rng.exponential(size=20)[heads] + rng.exponential(size=20)[tails]).round(2)
    fitted = sm.OLS(ranks, np.ones(len(ranks))).fit()
    variances = cov_cluster_2groups(fitted, heads, tails)
    return {
        "p": families,
        "holm": [multipletests(p, method="holm")[1].tolist() for p in families],
        "ranks": ranks.tolist(),
        "heads": heads.tolist(),
        "tails": tails.tolist(),
        "variance": [float(np.squeeze(variance)) for variance in variances],
    }


def main() -> None:
    rows = rated_rows()
    record = {
        "versions": {name: version(name) for name in ("pykeen", "arch", "statsmodels")},
        "rankings": {
            name: {
                **{key: values.tolist() for key, values in case.items()},
                "pykeen": pykeen_figures(**case),
            }
            for name, case in ranking_cases().items()
        },
        "rows": {name: values.tolist() for name, values in rows.items()},
        "arch": arch_figures(rows),
        "statsmodels": statsmodels_figures(),
    }
    PEERS.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
