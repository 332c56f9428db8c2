"""The end of a process that has imported vLLM: nothing is collected, and the exit status stays."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, sys
gc.disable()

class Node:
    def __del__(self):
        os.write(1, b"collected")

node = Node()
node.itself = node
del node
{skip}
print("said", file=sys.stderr)
sys.exit(3)
"""
SKIP = "from rheostat_engine.process_end import skip_last_collection; skip_last_collection({})"


@pytest.mark.parametrize(
    ("skip", "said"),
    [
        ("", b"collected"),
        (SKIP.format(""), b"collected"),
        (SKIP.format("own_process=True"), b""),
    ],
)
def test_garbage_is_left_to_the_system_at_the_end(skip: str, said: bytes) -> None:
    program = PROGRAM.format(skip=skip)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, said)
    assert ended.stderr == b"said\n"


def test_errors_of_finalisers_are_reported_and_native_messages_are_not() -> None:
    program = f"""
import atexit, os, sys, types

class Failing:
    def __del__(self):
        raise ValueError("the finaliser failed")

sys.modules["other"] = types.ModuleType("other")
sys.modules["other"].failing = Failing()
atexit.register(os.write, 2, b"written by a library")
{SKIP.format("own_process=True")}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == 0
    assert b"ValueError: the finaliser failed" in ended.stderr
    assert b"written by a library" not in ended.stderr
