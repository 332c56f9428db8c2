"""Rows that a server's `filesystem` sink wrote, read back: `open_captures`, numpy alone.

    stored = captures.open_captures("/data/captures", tag="probe")
    for batch in stored.rows("resid_post", 3):
        probe.learn(batch.values, batch.token_ids)

The layout and the format of the files do not matter to a reader. Only complete requests can be
read: a request appears with all of its rows, even while the server writes other requests.
"""

from rheostat.captures._batches import RowBatch
from rheostat.captures._manifests import StoredRequest, StoredTable
from rheostat.captures._store import StoredCaptures, open_captures

__all__ = ["RowBatch", "StoredCaptures", "StoredRequest", "StoredTable", "open_captures"]
