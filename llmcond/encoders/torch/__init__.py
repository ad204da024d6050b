"""The computation of vectors: tokenising, batching, attention of packed rows, and pooling."""
