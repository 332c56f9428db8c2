"""Prompts: tokenises texts and chats."""
