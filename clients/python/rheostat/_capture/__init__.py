"""What is captured of a request, and captured rows: specs, encodings, rows, runs and files."""
