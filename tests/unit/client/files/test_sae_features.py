"""Features of SAEs with their encoders, from a folder as SAELens writes it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import rheostat
from rheostat import Band, Clamp, Scale
from rheostat_wire.v1 import steering_pb2, vector_pb2

RNG = np.random.default_rng(2)
D_SAE, D_IN = 5, 4
CONFIG = {
    "architecture": "standard",
    "d_in": D_IN,
    "d_sae": D_SAE,
    "apply_b_dec_to_input": True,
    "normalize_activations": "none",
    "hook_name": "blocks.8.hook_resid_post",
}
WEIGHTS = {
    "W_enc": RNG.normal(size=(D_IN, D_SAE)).astype(np.float32),
    "b_enc": RNG.normal(size=D_SAE).astype(np.float32),
    "W_dec": RNG.normal(size=(D_SAE, D_IN)).astype(np.float32),
    "b_dec": RNG.normal(size=D_IN).astype(np.float32),
}
THRESHOLD = {"threshold": np.arange(1, D_SAE + 1, dtype=np.float32) / 8}


def write(folder, config=CONFIG, weights=WEIGHTS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config))
    save_file({name: value for name, value in weights.items() if value is not None},
              folder / "sae_weights.safetensors")  # fmt: skip
    return folder


@pytest.mark.parametrize("kind", ["standard", "jumprelu"])
@pytest.mark.parametrize("subtracts", [True, False])
def test_a_feature_reads_with_a_column_and_writes_with_a_row(tmp_path, kind, subtracts):
    config = {**CONFIG, "architecture": kind, "apply_b_dec_to_input": subtracts}
    weights = WEIGHTS | (THRESHOLD if kind == "jumprelu" else {})
    found = rheostat.load_sae_feature(write(tmp_path, config, weights), 3)
    column = WEIGHTS["W_enc"][:, 3]
    assert found.read.vector == rheostat.inline(column, points="resid_post", layers=8)
    assert found.write == rheostat.inline(WEIGHTS["W_dec"][3], points="resid_post", layers=8)
    bias = WEIGHTS["b_enc"][3] - subtracts * (WEIGHTS["b_dec"] @ column)
    settings = found.read.settings
    assert settings.bias == pytest.approx(bias, rel=1e-6)
    expected = ("jump_relu", 0.5) if kind == "jumprelu" else ("relu", None)
    assert (settings.activation, settings.theta, settings.normalise) == (*expected, "none")


def test_a_threshold_below_zero_cuts_no_more_than_the_relu(tmp_path):
    below = {"threshold": np.full(D_SAE, -1, np.float32)}
    config = CONFIG | {"architecture": "jumprelu"}
    settings = rheostat.load_sae_feature(write(tmp_path, config, WEIGHTS | below), 2).read.settings
    assert (settings.activation, settings.theta) == ("jump_relu", 0.0)


def test_a_feature_is_clamped_scaled_and_probed(tmp_path):
    found = rheostat.load_sae_feature(write(tmp_path), 1)
    read, write_to = found.read, found.write
    assert found.clamp(2.0) == Clamp((Band(read, 2.0, 2.0, 1.0, write_to),))
    assert found.clamp(min=1.0, strength=0.5, only_on=True) == Clamp(
        (Band(read, 1.0, None, 0.5, write_to, True),)
    )
    assert found.scale(0.0) == Scale(read, 0.0, write_to)
    message = found.clamp(2.0, only_on=True).to_wire("i")
    (band,) = message.clamp.bands
    assert (band.min, band.max, band.only_on) == (2.0, 2.0, True)
    assert band.read.activation == vector_pb2.ACTIVATION_RELU
    assert band.write.inline.inline == WEIGHTS["W_dec"][1].tobytes()
    assert list(message.sites.list.layers) == [8]
    probe = found.probe()
    assert (probe.readout, probe.vector) == (read.settings, read.vector)
    with pytest.raises(rheostat.InvalidRequest, match="give a value, or min and max"):
        found.clamp(2.0, min=1.0)


def test_a_readout_in_a_clamp_says_all_that_it_reads(tmp_path):
    joy, calm = (
        rheostat.inline(np.ones((1, 4), np.float32) * k, points="resid_post", layers=1)
        for k in (1, 2)
    )
    read = rheostat.readout(joy, bias=0.5, normalise="cosine", activation="tanh")
    message = rheostat.clamp(read, max=0.25, write=calm).to_wire("i")
    (band,) = message.clamp.bands
    assert (band.read.bias, band.read.normalise) == (0.5, vector_pb2.NORMALISE_COSINE)
    assert band.read.activation == vector_pb2.ACTIVATION_TANH
    scaled = rheostat.scale(read, 0.5, write=calm).to_wire("i").scale
    assert (scaled.read, scaled.write) == (band.read, band.write)
    plain = rheostat.clamp(joy, max=0.25).to_wire("i").clamp.bands[0]
    assert plain == steering_pb2.Band(
        read=vector_pb2.Readout(vector=band.read.vector, normalise=vector_pb2.NORMALISE_UNIT),
        max=0.25,
        strength=1.0,
    )
    assert str(rheostat.clamp(read, max=0.25, write=calm)).startswith("clamp tanh(cosine ")


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        ({"architecture": "gated"}, {}, "has the architecture 'gated'"),
        ({"architecture": "topk"}, {}, "has the architecture 'topk'"),
        ({"activation_fn_str": "tanh-relu"}, {}, "has the activation 'tanh-relu'"),
        ({"architecture": "jumprelu"}, {}, "is a JumpReLU SAE, but has no threshold"),
        ({"normalize_activations": "layer_norm"}, {}, "normalises its input ('layer_norm')"),
        ({"finetuning_scaling_factor": True}, {}, "scales its activations"),
        (
            {"hook_name_out": "blocks.8.hook_mlp_out", "d_out": D_IN},
            {},
            "is a transcoder, which reads and writes at different sites",
        ),
        ({}, {"W_enc": None}, "has no W_enc [d_in, d_sae]"),
        ({}, {"b_enc": None}, "with b_enc [d_sae]"),
        ({}, {"b_enc": np.zeros(3, np.float32)}, "with b_enc [d_sae]"),
        ({}, {"threshold": np.zeros(3, np.float32)}, "has no threshold [d_sae]"),
        ({}, {"b_dec": np.zeros(3, np.float32)}, "has no b_dec [d_in]"),
    ],
)
def test_an_sae_whose_features_are_other_functions_is_refused(tmp_path, config, weights, said):
    path = write(tmp_path, CONFIG | config, WEIGHTS | weights)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.load_sae_feature(path, 1)
    assert said in raised.value.message
