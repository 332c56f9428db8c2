"""Generated code. Nothing here is public."""
