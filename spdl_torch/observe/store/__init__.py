"""The statistics file: its entries, and how they are written, read and summed up."""
