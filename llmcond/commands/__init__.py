"""Commands of the command line, a file each: their options, one verb, and what is printed."""
