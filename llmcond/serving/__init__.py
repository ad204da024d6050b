"""A server of embeddings under a condition, for applications and for clients of OpenAI's protocol.

Requests wait in one queue, of which a thread that owns the model takes batches.
"""
