"""Features: extracted once, stored on disk, and read as arrays."""
