"""Ratings by a language model: questions, the server that answers them, and stored answers."""
