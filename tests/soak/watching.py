"""Watches whose connections are cut, on a server with a scripted engine.

    python -m tests.soak.watching --cuts 1000
    python -m tests.soak.watching --cuts 1000 --client aio --out results/watch-cuts.json

Prints what came, as JSON. Exits 1 if anything was lost, came twice or was wrong.
`tests/unit/client/watches/test_reconnect.py` cuts ten times, with the same checks.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from rheostat_bench.machine import circumstances
from tests.unit.client.cutting_proxy import CuttingProxy
from tests.unit.client.rows_server import AioSubscriber, RowsServer, SyncSubscriber
from tests.unit.client.watches.cuts import cut_watch

CLIENTS = {"sync": SyncSubscriber, "aio": AioSubscriber}


def main() -> None:
    """Cuts the connections."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--client", choices=CLIENTS, default="sync")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    logging.getLogger("rheostat").setLevel(logging.ERROR)  # each cut is a warning
    began = time.monotonic()
    running = RowsServer(heartbeat=0.05)
    proxy = CuttingProxy(running.port)
    client = CLIENTS[arguments.client](proxy.target)
    try:
        found = cut_watch(running, proxy, client, arguments.cuts, arguments.seed)
    finally:
        client.end()
        proxy.close()
        running.stop()
    report = {
        "benchmark": "cut connections of a watch",
        **circumstances(),
        "seed": arguments.seed,
        "client": arguments.client,
        "seconds": round(time.monotonic() - began, 1),
        **found._asdict(),
    }
    text = json.dumps(report, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(f"{text}\n", encoding="utf-8")
    print(text)
    sys.exit(bool(found.lost or found.repeated or found.wrong))


if __name__ == "__main__":
    main()
