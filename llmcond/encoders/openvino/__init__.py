"""Encoders on a CPU with OpenVINO, which is faster than PyTorch and does not import it.

The module ``support`` decides whether OpenVINO can run an encoder, ``weights`` reads the tensors,
``graph`` builds the network, ``tokenizer`` loads the tokenizer, and ``engine`` runs the encoder.
"""
