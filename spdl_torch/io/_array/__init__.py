"""Arrays in numpy's formats, as views into the given memory."""
