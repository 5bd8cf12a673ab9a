"""The command ``prepare``: a folder of files becomes tar shards with indexes.

samples -> shards: what goes where is planned from names alone, files are encoded on threads, and
one thread writes them in the plan's order.
"""
