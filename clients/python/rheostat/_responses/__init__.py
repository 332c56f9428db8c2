"""What a server answers, as values: results, receipts, explanations, and the server itself."""
