"""Photographs to measure with: what ``demo`` reads, and the command that writes them.

Importing it does not import torch.
"""
