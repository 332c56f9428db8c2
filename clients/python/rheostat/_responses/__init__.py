"""The server's answers as Python values: results, receipts, explanations, model and counters."""
