"""Encoders on a CPU by OpenVINO: faster than PyTorch, and without importing it.

``support`` decides whether an encoder can be run so, ``weights`` reads its tensors, ``graph`` makes
its network, ``tokenizer`` its tokenizer, and ``engine`` runs it.
"""
