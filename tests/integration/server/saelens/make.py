"""Makes the SAEs beside this file, and what SAELens computes with them, with SAELens's own code.

SAELens and its many dependencies are not needed to run the tests. To make the files anew, for
example after the bundled model has changed:

    python -m venv /tmp/saelens
    /tmp/saelens/bin/pip install sae-lens==6.54.12
    /tmp/saelens/bin/python tests/integration/server/saelens/make.py

rows.safetensors has the `tokens` of a prompt, [n], and the `rows` of `resid_post` of a layer of the
bundled model at them, [n, width]. For each SAE there is a folder with the two files that SAELens
writes and results.safetensors:

* `activations`, [n, features]: `encode(rows)`;
* `clamped`, [n, width]: the output with its error term if a hook at `hook_sae_acts_post` sets
  `FEATURE` to `VALUE` at every row.

SAELens loads every SAE in float32. In the type of its file it would round activations to bfloat16.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import transformers as hf
from sae_lens import (
    SAE,
    BatchTopKTrainingSAE,
    BatchTopKTrainingSAEConfig,
    JumpReLUSAE,
    JumpReLUSAEConfig,
    StandardSAE,
    StandardSAEConfig,
)
from sae_lens.saes.sae import SAEMetadata
from safetensors.torch import save_file

HERE = Path(__file__).parent
MODEL = HERE.parents[3] / "server" / "rheostat_server" / "demo_model"
PROMPT = "The weather was grey and Anna felt"
LAYER = 2
FEATURES = 4
FEATURE = 1
VALUE = 3.0


def stream() -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of the prompt, [n], and their rows, [n, width]."""
    tokens = hf.AutoTokenizer.from_pretrained(MODEL)(PROMPT, return_tensors="pt").input_ids
    model = hf.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    return tokens[0], hidden[LAYER + 1][0].contiguous()


def options(rows: torch.Tensor, dtype: str, subtracts: bool) -> dict[str, object]:
    """Arguments of every configuration."""
    metadata = SAEMetadata(
        model_name="demo", hook_name=f"blocks.{LAYER}.hook_resid_post", hook_head_index=None
    )
    return {
        "d_in": rows.shape[1],
        "d_sae": FEATURES,
        "dtype": dtype,
        "apply_b_dec_to_input": subtracts,
        "metadata": metadata,
    }


@torch.no_grad()
def fill(sae: torch.nn.Module, rows: torch.Tensor, subtracts: bool) -> None:
    """Draws weights with which each feature is on at about half of the rows."""
    width = rows.shape[1]
    encoder = torch.randn(width, FEATURES) / width**0.5
    bias = torch.randn(width) / 4
    before = (rows - bias * subtracts) @ encoder
    sae.W_enc.copy_(encoder)
    sae.W_dec.copy_(torch.randn(FEATURES, width))
    sae.b_dec.copy_(bias)
    sae.b_enc.copy_(-before.median(0).values + 0.05)


def standard(rows: torch.Tensor, folder: Path, dtype: str, subtracts: bool) -> None:
    """Saves a `StandardSAE`."""
    sae = StandardSAE(StandardSAEConfig(**options(rows, dtype, subtracts)))
    fill(sae, rows, subtracts)
    sae.save_model(folder)


def jumprelu(rows: torch.Tensor, folder: Path, dtype: str, subtracts: bool) -> None:
    """Saves a `JumpReLUSAE`. One threshold is below 0, where the ReLU cuts first."""
    sae = JumpReLUSAE(JumpReLUSAEConfig(**options(rows, dtype, subtracts)))
    fill(sae, rows, subtracts)
    with torch.no_grad():
        sae.threshold.copy_(torch.tensor([-0.5, 0.1, 0.2, 0.4]))
    sae.save_model(folder)


def batchtopk(rows: torch.Tensor, folder: Path, dtype: str, subtracts: bool) -> None:
    """Saves a `BatchTopKTrainingSAE` for inference: as a JumpReLU with folded norms."""
    sae = BatchTopKTrainingSAE(
        BatchTopKTrainingSAEConfig(**options(rows, dtype, subtracts), k=FEATURES / 2)
    )
    fill(sae, rows, subtracts)
    sae.topk_threshold.fill_(0.3 * sae.get_W_dec_norm().mean())
    sae.save_inference_model(folder)


Save = Callable[[torch.Tensor, Path, str, bool], None]
SAES: dict[str, tuple[Save, str, bool]] = {
    "standard": (standard, "float32", True),
    "standard-bfloat16": (standard, "bfloat16", False),
    "jumprelu": (jumprelu, "float32", False),
    "jumprelu-float16": (jumprelu, "float16", True),
    "batchtopk": (batchtopk, "float32", True),
}
"""How each is saved, its type, and whether it subtracts `b_dec` from its input."""


@torch.no_grad()
def results(folder: Path, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """What SAELens computes with a saved SAE."""
    sae = SAE.load_from_disk(folder, dtype="float32")
    activations = sae.encode(rows)
    on = (activations[:, FEATURE] > 0).sum()
    assert 0 < on < len(rows), f"{folder.name}: the feature is on at {on} of {len(rows)} rows"

    def set_feature(acts: torch.Tensor, hook: object) -> torch.Tensor:
        acts = acts.clone()
        acts[:, FEATURE] = VALUE
        return acts

    sae.use_error_term = True
    clamped = sae.run_with_hooks(rows, fwd_hooks=[("hook_sae_acts_post", set_feature)])
    return {"activations": activations, "clamped": clamped}


def main() -> None:
    """Writes all files."""
    tokens, rows = stream()
    save_file({"tokens": tokens, "rows": rows}, HERE / "rows.safetensors")
    for seed, (name, (save, dtype, subtracts)) in enumerate(SAES.items()):
        torch.manual_seed(seed)
        folder = HERE / name
        save(rows, folder, dtype, subtracts)
        save_file(results(folder, rows), folder / "results.safetensors")


if __name__ == "__main__":
    main()
