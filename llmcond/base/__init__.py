"""What every other folder may use: errors, options, files, records, metrics and arrays."""
