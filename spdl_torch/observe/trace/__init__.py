"""Traces: what every thread did when, in files that trace viewers show."""
