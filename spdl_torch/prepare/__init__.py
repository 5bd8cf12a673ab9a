"""The command ``prepare``: a folder of files becomes tar shards with indexes.

samples -> shards: what goes where is planned from names and sizes alone, files are encoded on
threads, and one thread writes them in the plan's order, so the bytes depend on nothing else.
"""
