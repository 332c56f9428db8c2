"""A compiled server computes what Hugging Face's model does, as the eager one does."""

import pytest
import transformers as hf

import rheostat

from ..engine.reference import HfReference
from .conftest import MODEL, Server, assert_empty
from .test_generation import assert_huggingfaces

pytestmark = pytest.mark.integration


def test_rows_of_prompt_and_generated_tokens_equal_hugging_faces_when_compiled(
    compiled_server: Server, reference: HfReference
) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(MODEL)
    with rheostat.connect(compiled_server.target) as engine:
        assert engine.model().engine.compiled
        assert_huggingfaces(engine, reference, tokenizer)
        assert_empty(engine)
