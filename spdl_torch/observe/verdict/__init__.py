"""What holds training back: the measurements it rests on, the judgement, and the report."""
