"""What the model's final norm and unembedding make of rows, and directions of tokens."""
