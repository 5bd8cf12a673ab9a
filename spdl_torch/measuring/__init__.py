"""What the commands that measure share: photographs and videos.

Importing it does not import torch, and it does not know which command it serves.
"""
