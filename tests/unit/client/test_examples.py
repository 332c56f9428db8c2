"""What the examples compute, apart from any server."""

import importlib.util
import math
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "examples" / "dose_response.py"
SPEC = importlib.util.spec_from_file_location("dose_response", PATH)
dose_response = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(dose_response)


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ([" lovely and bleak!", " the the"], 0.5),
        ([" joy, joy and joy", " hope", " rainy"], 0.8),
        ([" grim..."], 0.0),
        ([" the the", ""], math.nan),
        ([], math.nan),
    ],
)
def test_the_joyful_share_is_not_a_number_where_no_word_has_a_tone(texts, share):
    found = dose_response.joyful_share(texts)
    assert found == pytest.approx(share, nan_ok=True)
