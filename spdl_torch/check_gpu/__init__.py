"""``python -m spdl_torch check-gpu``: whether batches reach this machine's GPU whole, and how fast.

sheet -> lines as they come in, and the verdict
gpu -> what the checks ask of a device; the tests have one without a GPU
correctness, races, resources, exits, rates -> the checks
command -> their order, the time limit, the exit status
"""
