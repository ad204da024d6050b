"""Features: extracted once, kept on disk, read back as arrays."""
