"""An HTTP server of embeddings under a condition, with OpenAI's embeddings protocol.

Requests wait in one queue. A single thread owns the model and takes batches from the queue.
"""
