"""Parts of the demo model's training script: corpus, tokenizer, training, measures."""
