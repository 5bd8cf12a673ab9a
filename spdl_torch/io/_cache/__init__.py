"""A store of bytes that all processes on a machine share."""
