"""Loading an encoder onto a device: architecture, number type, quantisation and memory."""
