"""The number of rows that the server lost before they reached their readers."""


class Deliveries:
    """The rows of all requests on their way to all readers. Used on the event loop alone."""

    def __init__(self) -> None:
        """No row was lost."""
        self.lost_rows = 0
        """Rows, once for each reader that lost it, reported to its client or not."""
