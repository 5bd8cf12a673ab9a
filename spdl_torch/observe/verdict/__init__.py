"""The verdict on what holds training back: its measurements, its judgement and its report."""
