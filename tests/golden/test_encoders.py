"""Real encoders compared with vectors that ``record_encoders.py`` recorded from other libraries."""

import gc
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.golden import CASES, excerpt
from helpers.vectors import assert_close, cosines

from llmcond.base.errors import UserError
from llmcond.encoders import EncoderInput
from llmcond.encoders.encoder import load_encoder
from llmcond.encoders.spec import Router

pytestmark = [pytest.mark.weights, pytest.mark.filterwarnings("ignore:.*longer than")]

RECORDED = json.loads(Path(__file__).with_name("encoders.json").read_text("utf-8"))["encoders"]
#: Computed by OpenVINO too, like other encoders of the BERT kind.
MPNET = "all-mpnet-base-v2"
#: Encoders that OpenVINO computes as well.
IN_OPENVINO = (MPNET, "embeddinggemma-300m")
#: Smallest cosine with the recorded vectors in bfloat16; 0.9994 was measured.
LOWEST_COSINE = 0.998


#: The encoder that was loaded last, by its folder and settings.
_LOADED = {}


def load(folder, **settings):
    """Load an encoder, unless it was loaded last. Two at a time would need much memory."""
    key = (folder, *settings.items())
    if key not in _LOADED:
        _LOADED.clear()
        gc.collect()
        _LOADED[key] = load_encoder(folder, device="cpu", **settings)
    return _LOADED[key]


def make_input(values):
    values = dict(values)
    router = Router(*values.pop("router")) if "router" in values else None
    return EncoderInput(**{"instruction": "", **values}, router=router)


RUNS = [
    pytest.param(name, dtype, runtime, case, id=f"{name}-{dtype}-{runtime}-{case}")
    for name, cases in CASES.items()
    for dtype in ("float32", "bfloat16")
    for runtime in (["torch", "openvino"] if name in IN_OPENVINO else ["torch"])
    for case in cases
]


@pytest.mark.parametrize(("name", "dtype", "runtime", "case"), RUNS)
@pytest.mark.usefixtures("native_16_bit")
def test_vectors_equal_recorded_ones(real_checkpoint, name, dtype, runtime, case):
    settings, values = CASES[name][case]
    encoder = load(real_checkpoint(name), dtype=dtype, runtime=runtime, **settings)
    inputs, expected = list(map(make_input, values)), np.array(RECORDED[name][case])

    def check():
        encoded = encoder.encode_with_counts(inputs)
        actual = excerpt(encoded.vectors)
        if dtype == "float32":
            assert_close(actual, expected)
        else:
            assert cosines(actual[:, 1:], expected[:, 1:]).min() > LOWEST_COSINE
            np.testing.assert_allclose(actual[:, 0], expected[:, 0], rtol=0.01)
        return encoded

    encoded = check()
    if encoder.resolved.shares_prefixes and case == "instructed":
        assert encoded.n_computed < encoded.n_tokens.sum()
    # MPNet adds biases of relative positions to its attention, so its inputs are not packed.
    if runtime == "torch" and name != MPNET:
        assert encoder.engine.packs
        encoder.engine.packs = False
        check()
        encoder.engine.packs = True


def test_what_real_encoders_do_not_support_is_refused(real_checkpoint):
    gemma = real_checkpoint("embeddinggemma-300m")
    with pytest.raises(UserError, match="not a pair of context and text"):
        load(gemma).encode([EncoderInput("", "the place", context="dogs")])
    with pytest.raises(UserError, match="does not work in float16"):
        load(gemma, dtype="float16")
    with pytest.raises(UserError, match="cannot have a router inside"):
        load(gemma, router="csr")
