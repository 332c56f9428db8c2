"""Prompts: texts and messages become token ids."""
