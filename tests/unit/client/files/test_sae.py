"""Rows of an SAE's decoder, from a folder as SAELens writes it."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

import rheostat

RNG = np.random.default_rng(1)
D_SAE, D_IN = 5, 4
DECODER = RNG.standard_normal((D_SAE, D_IN)).astype(np.float32)
TOP = {"d_in": D_IN, "d_sae": D_SAE, "dtype": "float32", "architecture": "standard"}
HOOK = {"hook_name": "blocks.8.hook_resid_post", "hook_layer": 8, "model_name": "gpt2-small"}


def write(folder, config, decoder=DECODER, name="sae_weights.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config))
    weights = {
        "W_enc": np.zeros((D_IN, D_SAE), np.float32),
        "b_enc": np.zeros(D_SAE, np.float32),
        "b_dec": np.zeros(D_IN, np.float32),
    }
    if decoder is not None:
        weights["W_dec"] = decoder
    save_file(weights, folder / name)


@pytest.mark.parametrize("config", [{**TOP, **HOOK}, {**TOP, "metadata": HOOK}])
@pytest.mark.parametrize("feature", [0, 3, D_SAE - 1])
def test_a_feature_is_its_row_of_the_decoder_at_the_hook_of_the_sae(tmp_path, config, feature):
    write(tmp_path / "sae", config)
    expected = rheostat.inline(DECODER[feature], points="resid_post", layers=8)
    for path in (tmp_path / "sae", tmp_path / "sae" / "sae_weights.safetensors"):
        found = rheostat.load_vector(path, feature=feature)
        assert found == expected
        assert found.description == (
            f"SAE feature {feature} of blocks.8.hook_resid_post, gpt2-small"
        )


@pytest.mark.parametrize("point", ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"])
def test_every_point_has_its_hook(tmp_path, point):
    write(tmp_path, {**TOP, "hook_name": f"blocks.11.hook_{point}"})
    found = rheostat.load_vector(tmp_path, feature=1)
    assert (found.points, found.layers) == ((point,), (11,))
    assert found.description == f"SAE feature 1 of blocks.11.hook_{point}"


def test_a_transcoder_writes_where_its_output_is(tmp_path):
    out = {"hook_name_out": "blocks.8.hook_mlp_out", "d_out": D_IN, "d_in": 9}
    write(tmp_path, {**TOP, **out, "hook_name": "blocks.8.ln2.hook_normalized"})
    found = rheostat.load_vector(tmp_path, feature=2)
    assert found == rheostat.inline(DECODER[2], points="mlp_out", layers=8)


def test_a_bfloat16_decoder_gives_the_row_s_bits(tmp_path):
    bits = RNG.integers(0, 0x7F00, (D_SAE, D_IN), np.uint16)
    said = {
        "b_dec": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "W_dec": {"dtype": "BF16", "shape": [D_SAE, D_IN], "data_offsets": [4, 4 + bits.nbytes]},
    }
    header = json.dumps(said).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(4) + bits.astype("<u2").tobytes()
    (tmp_path / "x.safetensors").write_bytes(data)
    (tmp_path / "cfg.json").write_text(json.dumps({**TOP, **HOOK}))
    found = rheostat.load_vector(tmp_path, feature=3)
    assert found == rheostat.inline(bits[3], points="resid_post", layers=8, dtype="bfloat16")


@pytest.mark.parametrize("feature", [None, -1, D_SAE])
def test_a_feature_that_is_not_there_says_which_are(tmp_path, feature):
    write(tmp_path, {**TOP, **HOOK})
    with pytest.raises(rheostat.InvalidRequest, match=r"give a feature: .* has 0 to 4") as e:
        rheostat.load_vector(tmp_path, feature=feature)
    assert e.value.path == "feature"


def test_the_file_of_an_sae_wants_a_feature(tmp_path):
    write(tmp_path, {**TOP, **HOOK})
    with pytest.raises(rheostat.InvalidRequest, match="is an SAE: give the feature to load"):
        rheostat.load_vector(tmp_path / "sae_weights.safetensors")


@pytest.mark.parametrize(
    ("config", "decoder", "said"),
    [
        (TOP, DECODER, "names no hook"),
        ({**TOP, "hook_name": "blocks.8.attn.hook_z"}, DECODER, "the hook 'blocks.8.attn.hook_z'"),
        ({**TOP, "hook_name": "blocks.8.hook_q_input"}, DECODER, "the hook must be blocks.N"),
        ({**TOP, **HOOK}, None, "has no decoder W_dec [d_sae, d_in]: give the file"),
        ({**TOP, **HOOK}, DECODER[0], "but one of rank 1"),
        ({**TOP, **HOOK, "d_in": 7}, DECODER, "[5, 4] where its cfg.json says [5, 7]"),
        ({**TOP, **HOOK, "d_sae": 7}, DECODER, "[5, 4] where its cfg.json says [7, 4]"),
        ([], DECODER, "is not a JSON object"),
        ({**TOP, **HOOK}, np.full((D_SAE, D_IN), np.nan, np.float32), "not finite"),
        ({**TOP, **HOOK}, DECODER.astype(np.int32), "type I32"),
    ],
)
def test_an_sae_that_cannot_be_used_says_why(tmp_path, config, decoder, said):
    write(tmp_path, config, decoder)
    with pytest.raises(rheostat.InvalidRequest) as raised:
        rheostat.load_vector(tmp_path, feature=1)
    assert said in raised.value.message
    assert str(tmp_path) in raised.value.path


def test_the_two_files_of_an_sae_must_be_there(tmp_path):
    with pytest.raises(rheostat.InvalidRequest, match=r"no sae_weights.safetensors, and 0 other"):
        rheostat.load_vector(tmp_path, feature=0)
    write(tmp_path, {**TOP, **HOOK}, name="a.safetensors")
    (tmp_path / "cfg.json").write_text("{")
    with pytest.raises(rheostat.InvalidRequest, match=r"cfg.json cannot be read"):
        rheostat.load_vector(tmp_path, feature=0)
    (tmp_path / "cfg.json").unlink()
    with pytest.raises(rheostat.InvalidRequest, match=r"cfg.json cannot be read .No such file"):
        rheostat.load_vector(tmp_path, feature=0)
