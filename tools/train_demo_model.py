"""Make Rheostat's bundled demo model: corpus, tokenizer, training, measures, pages.

    python tools/train_demo_model.py [--into DIRECTORY] [--page FILE]...

Needs torch, transformers, tokenizers, safetensors and numpy; takes some minutes on two CPU cores.
Every random choice is seeded, torch runs deterministic algorithms on THREADS threads, so a second
run on the same machine with the same package versions gives the same files byte for byte. Another
kind of CPU rounds differently and gives another model of the same quality.

After training the residual stream is scaled down, which changes no answer, so that a unit vector
times 2 to 6 is a strong dose. The weights are rounded to bfloat16 and stored so: loading them as
float32 is exact.
The figures are measured on the stored files and written between the marks in the pages.
"""

import argparse
import os
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model import figures, recall, steered, training, vocabulary

THREADS = 2
CORPUS_SEED = 1
WEIGHT_SEED = 0
HELD_OUT_SEED = 99
STREAM_SCALE = 0.25
TONE_LAYER = 3
DOSES = (-8.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
EDGES = (0, 128, 512, 1024, vocabulary.MAX_POSITIONS - 1)

REPOSITORY = Path(__file__).resolve().parent.parent
BUNDLE = REPOSITORY / "server" / "rheostat_server" / "demo_model"
PAGES = [BUNDLE / "README.md", REPOSITORY / "docs" / "demo-model.md"]


def make(into: Path) -> float:
    """Train tokenizer and model, save them into ``into``; returns the final training loss."""
    tokenizer = vocabulary.train(CORPUS_SEED)
    model = training.new_model(training.Shape(), tokenizer, WEIGHT_SEED)
    loss = training.train(model, tokenizer, training.Schedule(), CORPUS_SEED)
    training.scale_stream(model, STREAM_SCALE)
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)
    for file in into.iterdir():
        file.chmod(0o644)
    return loss


def measure(bundle: Path, loss: float) -> figures.Figures:
    """Load the files in ``bundle`` and measure what they can do."""
    tokenizer = AutoTokenizer.from_pretrained(bundle)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    narrow = LlamaForCausalLM.from_pretrained(bundle, dtype=torch.bfloat16)
    right_in_bfloat16 = sum(row.right for row in recall.recall(narrow, tokenizer))
    model = LlamaForCausalLM.from_pretrained(bundle, dtype=torch.float32)
    vectors, norms = steered.tone_vectors(model, tokenizer)
    vector = vectors[TONE_LAYER]
    direction = vector / vector.norm()
    return figures.Figures(
        parameters=sum(p.numel() for p in model.parameters()),
        loss=loss,
        recalls=recall.recall(model, tokenizer),
        right_in_bfloat16=right_in_bfloat16,
        chat=recall.answered(model, tokenizer),
        corruption=recall.corruption(model, tokenizer),
        traces=recall.landmark_traces(model, tokenizer, count=10),
        edges=EDGES,
        losses=training.losses_by_position(model, tokenizer, EDGES, HELD_OUT_SEED),
        tone_layer=TONE_LAYER,
        tone_norm=float(vector.norm()),
        stream_norm=float(norms[TONE_LAYER]),
        doses=[steered.dose(model, tokenizer, TONE_LAYER, direction, d) for d in DOSES],
    )


def main() -> None:
    """Make, measure, print, and write the figures down."""
    parser = argparse.ArgumentParser(description="Make Rheostat's demo model.")
    parser.add_argument("--into", type=Path, default=BUNDLE, help="where the model's files go")
    parser.add_argument(
        "--page", type=Path, action="append", help="a page to write the figures into"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    arguments.into.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    loss = make(arguments.into)
    trained = time.monotonic()
    measured = measure(arguments.into, loss)
    print(figures.section(measured))
    print(f"trained in {trained - started:.0f} s, measured in {time.monotonic() - trained:.0f} s")
    for page in arguments.page or PAGES:
        figures.write(page, measured)


if __name__ == "__main__":
    main()
