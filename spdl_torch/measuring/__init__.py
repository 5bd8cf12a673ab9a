"""What the commands that measure share: photographs, videos, the hand-over of batches.

Importing it does not import torch, and it does not know which command it serves.
"""
