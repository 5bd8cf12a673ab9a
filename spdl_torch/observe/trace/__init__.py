"""Traces, in which viewers show what every thread did when."""
