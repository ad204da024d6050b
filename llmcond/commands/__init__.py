"""The commands of the command line, one per module: options, work and printed result."""
