"""The Triton kernels compute what their plain twins do."""

import os
import subprocess
import sys
from pathlib import Path


def test_interpreted_kernels_equal_their_twins() -> None:
    # Triton reads TRITON_INTERPRET when it is imported, hence a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine.interpreted_kernels"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "kernels equal their twins\n"), done.stderr
