"""Buffers, tables and ids that steering and capture share."""
