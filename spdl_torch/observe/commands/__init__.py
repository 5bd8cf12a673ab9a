"""The commands that read statistics files and traces: their options, and what they print."""
