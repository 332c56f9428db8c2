"""Responses: tokens, receipts, sessions, explanations."""
