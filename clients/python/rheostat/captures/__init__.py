"""Reads the rows that a server's `filesystem` sink wrote, with numpy alone.

    stored = captures.open_captures("/data/captures", tag="probe")
    for batch in stored.rows("resid_post", 3):
        probe.learn(batch.values, batch.token_ids)

All layouts and formats are read in the same way. A request appears once all of its rows are stored,
also while the server writes other requests.
"""

from rheostat.captures._batches import RowBatch
from rheostat.captures._manifests import StoredRequest, StoredTable
from rheostat.captures._store import StoredCaptures, open_captures

__all__ = ["RowBatch", "StoredCaptures", "StoredRequest", "StoredTable", "open_captures"]
