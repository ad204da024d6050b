"""From tokens to vectors: tokenizing, batches, attention of packed rows, and pooling."""
