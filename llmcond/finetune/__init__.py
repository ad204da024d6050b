"""Training of an encoder together with a head: with LoRA, or with all weights of the encoder."""
