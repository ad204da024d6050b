"""Tasks of mteb with conditions, in the form in which they can be proposed to mteb.

This module imports nothing of llmcond, so that its classes can be copied into ``mteb/tasks``. Their
data is on the Hugging Face hub; ``llmcond.integrations.mteb`` has the same tasks on local data.

mteb passes the column ``condition`` to the model, next to ``text``. Models that do not read it are
scored on the texts alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, ClassVar

import numpy as np
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

_CSTS_CITATION = r"""
@inproceedings{deshpande-etal-2023-csts,
  author = {Deshpande, Ameet and Jimenez, Carlos E. and Chen, Howard and Murahari, Vishvak and Graf, Victoria and Rajpurohit, Tanmay and Kalyan, Ashwin and Chen, Danqi and Narasimhan, Karthik},
  booktitle = {Proceedings of the 2023 Conference on Empirical Methods in Natural Language Processing},
  pages = {5669--5690},
  publisher = {Association for Computational Linguistics},
  title = {{C-STS}: Conditional Semantic Textual Similarity},
  year = {2023},
}

@inproceedings{tu-etal-2024-linguistically,
  author = {Tu, Jingxuan and Xu, Keer and Yue, Liulu and Ye, Bingyang and Rim, Kyeongmin and Pustejovsky, James},
  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics (Volume 1: Long Papers)},
  pages = {1161--1172},
  publisher = {Association for Computational Linguistics},
  title = {Linguistically Conditioned Semantic Textual Similarity},
  year = {2024},
}

@misc{zhang2025annotating,
  archiveprefix = {arXiv},
  author = {Zhang, Gaifan and Zhou, Yi and Bollegala, Danushka},
  eprint = {2509.14399},
  primaryclass = {cs.CL},
  title = {Annotating Training Data for Conditional Semantic Textual Similarity Measurement using Large Language Models},
  year = {2025},
}
"""  # noqa: E501 - a line for each field, as mteb formats citations

_TRIPLES_CITATION = r"""
@inproceedings{casanueva-etal-2022-nlu,
  author = {Casanueva, I{\~n}igo and Vuli{\'c}, Ivan and Spithourakis, Georgios and Budzianowski, Pawe{\l}},
  booktitle = {Findings of the Association for Computational Linguistics: NAACL 2022},
  title = {{NLU++}: A Multi-Label, Slot-Rich, Generalisable Dataset for Natural Language Understanding in Task-Oriented Dialogue},
  year = {2022},
}

@misc{coucke2018snips,
  archiveprefix = {arXiv},
  author = {Coucke, Alice and Saade, Alaa and Ball, Adrien and Bluche, Th{\'e}odore and Caulier, Alexandre and Leroy, David and Doumouro, Cl{\'e}ment and Gisselbrecht, Thibault and Caltagirone, Francesco and Lavril, Thibaut and Primet, Ma{\"e}l and Dureau, Joseph},
  eprint = {1805.10190},
  primaryclass = {cs.CL},
  title = {Snips Voice Platform: an embedded Spoken Language Understanding system for private-by-design voice interfaces},
  year = {2018},
}

@misc{liu2019benchmarking,
  archiveprefix = {arXiv},
  author = {Liu, Xingkun and Eshghi, Arash and Swietojanski, Pawel and Rieser, Verena},
  eprint = {1903.05566},
  primaryclass = {cs.CL},
  title = {Benchmarking Natural Language Understanding Services for building Conversational Agents},
  year = {2019},
}

@inproceedings{rastogi2020towards,
  author = {Rastogi, Abhinav and Zang, Xiaoxue and Sunkara, Srinivas and Gupta, Raghav and Khaitan, Pranav},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  title = {Towards Scalable Multi-Domain Conversational Agents: The Schema-Guided Dialogue Dataset},
  year = {2020},
}
"""  # noqa: E501

#: Similarities that differ by no more than this, which is the rounding of float32, are ties.
_TIE = 1e-7
#: Columns of the first and the second text, by the names that a model reads.
_FIRST, _SECOND = ({"condition": "condition", f"sentence{number}": "text"} for number in (1, 2))
#: The same columns by their modalities. Statistics of the texts describe the last column, and pairs
#: are only equal if their conditions are, too.
_FIRST_MODALITIES, _SECOND_MODALITIES = (dict.fromkeys(side, "text") for side in (_FIRST, _SECOND))


class ConditionalSTS(AbsTaskSTS):  # type: ignore[misc]  # mteb has no types
    """Conditional semantic textual similarity."""

    min_score, max_score = 1, 5
    column_names: ClassVar[tuple[Mapping[str, str], Mapping[str, str]]] = (_FIRST, _SECOND)
    metadata = TaskMetadata(
        name="CSTS",
        description=(
            "The similarity of two sentences with regard to a condition, such as 'the number of "
            "people'. A pair of sentences, mostly captions of images, has a rating under each of "
            "two conditions, so a model that ignores the condition cannot be right under both. "
            "These are the ratings of C-STS's validation split after their revision. Pairs whose "
            "condition is ill-defined have no rating and are left out."
        ),
        reference="https://arxiv.org/abs/2509.14399",
        dataset={"path": "LivNLP/C-STS-Reannotated", "revision": "main"},
        type="STS",
        category="t2t",
        modalities=["text"],
        eval_splits=["validation"],
        eval_langs=["eng-Latn"],
        main_score="spearman",
        date=("2014-01-01", "2025-09-17"),
        domains=["Written"],
        task_subtypes=[],
        license="cc-by-4.0",
        annotations_creators="human-annotated",
        dialect=[],
        sample_creation="found",
        prompt="Retrieve text that is similar with regard to the given condition.",
        bibtex_citation=_CSTS_CITATION,
    )

    def dataset_transform(self, num_proc: int | None = None, **_: Any) -> None:
        """Drop pairs without a rating, and name the column of ratings as mteb does."""
        self.dataset: Any = self.dataset.rename_column("label", "score").filter(
            lambda row: row["score"] >= self.min_score, num_proc=num_proc
        )

    def _calculate_descriptive_statistics_from_split(self, split: str, **kwargs: Any) -> Any:
        described: Any = copy(self)
        described.column_names = (_FIRST_MODALITIES, _SECOND_MODALITIES)
        return AbsTaskSTS._calculate_descriptive_statistics_from_split(described, split, **kwargs)


class AspectTriplesPC(AbsTaskPairClassification):  # type: ignore[misc]  # mteb has no types
    """Paired triples: which of two texts is closer to an anchor depends on the condition.

    The four pairs of a triple follow each other: the anchor with each of two texts, under the
    condition in which the first one agrees with it, and under that in which the second one does.
    """

    input1_column_name: ClassVar[Mapping[str, str]] = _FIRST
    input2_column_name: ClassVar[Mapping[str, str]] = _SECOND
    metadata = TaskMetadata(
        name="AspectTriples",
        description=(
            "Requests with several annotated attributes, such as an intent and the value of a "
            "slot, in paired triples. A triple has an anchor, a text with the anchor's value of "
            "one condition only, and a text with its value of another condition only. Under each "
            "of the two conditions, the text that agrees in it must be closer to the anchor. The "
            "accuracy of a model that ignores the condition is exactly 50 %. The texts and "
            "attributes are from SNIPS (2017-06), HWU64, NLU++ and Schema-Guided Dialogue."
        ),
        reference="https://llmcond.github.io/llmcond/aspects/",
        dataset={"path": "llmcond/aspect-triples", "revision": "main"},
        type="PairClassification",
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs={name: ["eng-Latn"] for name in ("hwu", "nlupp", "sgd", "snips")},
        main_score="triple_accuracy",
        date=("2017-06-01", "2022-04-27"),
        domains=["Spoken", "Written"],
        task_subtypes=["Intent classification", "Dialog Systems"],
        license="multiple",
        annotations_creators="derived",
        dialect=[],
        sample_creation="found",
        prompt="Retrieve text that agrees with the given text in the given condition.",
        bibtex_citation=_TRIPLES_CITATION,
    )

    def _compute_metrics(self, similarity_scores: Any, labels: list[int]) -> dict[str, float]:
        metrics: dict[str, float] = super()._compute_metrics(similarity_scores, labels)
        similarities = np.reshape(similarity_scores["similarity_scores"], (-1, 2, 2))
        # (n, 2): how much closer the right text is, under each of a triple's conditions.
        leads = (similarities[..., 0] - similarities[..., 1]) * [1, -1]
        leads[np.abs(leads) <= _TIE] = 0
        metrics["triple_accuracy"] = float((np.sign(leads) + 1).mean() / 2)
        metrics["right_under_both"] = float((leads > 0).all(axis=1).mean())
        return metrics

    def _calculate_descriptive_statistics_from_split(self, split: str, **kwargs: Any) -> Any:
        described: Any = copy(self)
        described.input1_column_name = _FIRST_MODALITIES
        described.input2_column_name = _SECOND_MODALITIES
        return AbsTaskPairClassification._calculate_descriptive_statistics_from_split(
            described, split, **kwargs
        )
