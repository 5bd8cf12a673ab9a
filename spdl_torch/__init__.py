"""A drop-in for PyTorch's DataLoader that loads on threads inside the training process."""

__version__ = "0.1.0.dev0"
