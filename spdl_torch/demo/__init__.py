"""``python -m spdl_torch demo``: load and train with torch's DataLoader and with ours, compare.

training.py is the script that is measured, command.py lets the loaders take turns in it and says
what came out; photographs.py writes what is loaded, which imports no torch.
"""
