"""Record vectors of real encoders in encoders.json, from sentence-transformers and transformers.

    python scripts/fetch_encoders.py
    PYTHONPATH=scripts:tests python tests/golden/record_encoders.py

Each text is computed alone, in float32 and without llmcond.
"""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from fetch_encoders import encoders_folder
from helpers.golden import CASES, FORMAT, excerpt
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

RECORD = Path(__file__).with_name("encoders.json")


class SentenceEncoder:
    """An encoder as sentence-transformers computes it."""

    def __init__(self, folder):
        self.model = SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": "float32"}
        )
        self.tokenizer, self.network = self.model.tokenizer, self.model[0].auto_model

    def plain(self, text, prompt, pooling):
        return torch.from_numpy(self.model.encode([text], prompt=prompt or None))[0]

    def finish(self, state):
        """Apply the modules behind the pooling."""
        features = {"sentence_embedding": state[None]}
        for module in list(self.model)[2:]:
            features = module(features)
        return features["sentence_embedding"][0]

    def format(self, instruction):
        return f"task: {instruction} | query: "


class Decoder:
    """A language model as transformers computes it, with a pooling and unit norm."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def plain(self, text, prompt, pooling):
        states = hidden_states(self, self.tokenizer(prompt + text))
        return self.finish(states[-1] if pooling == "last" else states.mean(dim=0))

    def finish(self, state):
        return state / state.norm()

    def format(self, instruction):
        return FORMAT.format(instruction=instruction, text="")


def hidden_states(encoder, tokens):
    """Return the states of the tokens of one sequence."""
    row = tokens.convert_to_tensors("pt", prepend_batch_axis=True)
    return encoder.network(**row).last_hidden_state[0]


def pair_vector(encoder, context, text):
    """Pool the tokens of the text, which is read after its context."""
    tokens = encoder.tokenizer(context, text) if context else encoder.tokenizer(text)
    is_text = [part == bool(context) for part in tokens.sequence_ids()]  # None: a special token
    return encoder.finish(hidden_states(encoder, tokens)[torch.tensor(is_text)].mean(dim=0))


def routed_vector(encoder, text, condition, temperature, centre, standardize):
    """Weight the tokens of a text by a condition: the formula in docs/routers.md."""
    states = hidden_states(encoder, encoder.tokenizer(text))
    query = hidden_states(encoder, encoder.tokenizer(condition)).mean(dim=0)
    centred = states - states.mean(dim=0) * centre
    cosines = torch.nn.functional.cosine_similarity(centred, query[None])
    scale = cosines.std(correction=0) if standardize else 1
    return encoder.finish((cosines / (temperature * scale)).softmax(dim=0) @ states)


@torch.inference_mode()
def reference(encoder, settings, item):
    if "context" in item:
        vector = pair_vector(encoder, **item)
    elif "router" in item:
        vector = routed_vector(encoder, item["text"], *item["router"])
    else:
        prompt = encoder.format(item["instruction"]) if "instruction" in item else ""
        vector = encoder.plain(item["text"], prompt, settings.get("pooling"))
    return vector.numpy()


if __name__ == "__main__":
    libraries = ("torch", "transformers", "sentence-transformers")
    record = {"versions": {name: version(name) for name in libraries}, "encoders": {}}
    for name, cases in CASES.items():
        is_decoder = not (encoders_folder() / name / "modules.json").exists()
        encoder = (Decoder if is_decoder else SentenceEncoder)(encoders_folder() / name)
        record["encoders"][name] = recorded = {}
        for case, (settings, inputs) in cases.items():
            vectors = np.stack([reference(encoder, settings, item) for item in inputs])
            recorded[case] = [[round(float(x), 6) for x in row] for row in excerpt(vectors)]
            print(f"{name}: {case}", flush=True)
    RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")
