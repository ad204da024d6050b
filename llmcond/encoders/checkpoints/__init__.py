"""A checkpoint's files: where they are found, what they say, and the weights in them."""
