"""A store of bytes that all processes of a machine share."""
