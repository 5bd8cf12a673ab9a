"""The flight recorder: what every thread did in the last seconds."""
