"""The flight recorder, which keeps what every thread did in the last seconds."""
