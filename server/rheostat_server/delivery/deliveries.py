"""What the server delivers to all readers of rows together: what it lost, and how often rows leave.

A chunk of rows costs the event loop about the same whether it holds one row or ten: its labels, its
message and its place in a stream. With hundreds of requests a chunk for each new row would cost
more than the tokens. So the rows of a request wait a moment for the request's next rows, and the
moment grows with the number of requests. With few requests each row leaves at once.
"""

_FEEDS_AT_ONCE = 8
"""Feeds up to which rows leave at once."""

_CHUNKS_PER_SECOND = 2000
"""Chunks that all feeds together make in a second, about."""

_LONGEST_DELAY = 0.25
"""The longest that rows wait for others, in seconds."""


class Deliveries:
    """The rows of all requests on their way to all readers. Used on the event loop alone."""

    def __init__(self) -> None:
        """Nothing was delivered yet."""
        self.lost_rows = 0
        """Rows, one for each reader that lost it, whether its client was told already or not."""
        self.feeds = 0
        """Open feeds: one for each request and reader of its rows."""

    @property
    def delay(self) -> float:
        """Seconds that a new row waits for later rows of the same request."""
        if self.feeds <= _FEEDS_AT_ONCE:
            return 0.0
        return min(self.feeds / _CHUNKS_PER_SECOND, _LONGEST_DELAY)
