"""What is computed of the rows of prompts: vectors, conditions, and what a lens reads."""
