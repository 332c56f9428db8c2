"""A compiled server computes what Hugging Face's model does, as the eager one does."""

import pytest
import transformers as hf

import rheostat

from ..engine.reference import HfReference
from .conftest import MODEL, Server, assert_empty
from .test_generation import assert_huggingfaces
from .test_sweeps import assert_cells, connected

pytestmark = pytest.mark.integration


def test_rows_of_prompt_and_generated_tokens_equal_hugging_faces_when_compiled(
    compiled_server: Server, reference: HfReference
) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(MODEL)
    with rheostat.connect(compiled_server.target) as engine:
        assert engine.model().engine.compiled
        assert_huggingfaces(engine, reference, tokenizer)
        assert_empty(engine)


@pytest.mark.parametrize(
    ("direction", "point", "window"), [("DENOISE", "resid_post", 1), ("NOISE", "mlp_out", 3)]
)
def test_every_cell_of_a_sweep_is_what_hooks_give_when_compiled(
    compiled_server: Server, reference: HfReference, direction: str, point: str, window: int
) -> None:
    with connected(compiled_server) as services:
        assert_cells(services, reference, direction, point, window)
