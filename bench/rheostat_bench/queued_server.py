"""`rheostat`, with a record of how long requests wait for the prompts of earlier requests.

    python -c "from rheostat_bench.queued_server import main; main()" FILE serve MODEL ...

See `rheostat_engine.adapters.queue_record`, which says which requests are recorded, and how.
"""

import os
import sys
from typing import Any

import rheostat_engine
from rheostat._cli import main as run
from rheostat_engine import engine_kwargs
from rheostat_engine.adapters import queue_record


def main() -> None:
    """Runs the command line of `rheostat`."""
    file, *sys.argv[1:] = sys.argv[1:]
    os.environ[queue_record.FILE] = file

    def recorded_kwargs(*arguments: Any, **options: Any) -> dict[str, object]:
        scheduler = f"{queue_record.__name__}.{queue_record.recorded_scheduler.__name__}"
        return {**engine_kwargs(*arguments, **options), "scheduler_cls": scheduler}

    rheostat_engine.engine_kwargs = recorded_kwargs
    sys.exit(run())
