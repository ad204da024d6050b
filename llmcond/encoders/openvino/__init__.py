"""Encoders on a CPU with OpenVINO, which is faster than PyTorch and does not import it.

The module ``support`` decides whether OpenVINO can run an encoder, and reads its tensors.
``engine`` builds the network, reads the tokenizer and runs the encoder.
"""
