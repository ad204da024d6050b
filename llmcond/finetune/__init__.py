"""Training an encoder and a head together: LoRA, or all of a small encoder's weights."""
