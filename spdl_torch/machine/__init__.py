"""Facts about the machine, each with one owner: cores, memory, CPU time, probes and the GIL.

It stands below all that reports and steers, so that a report, a tuner and a warning never have two
answers to one question.
"""
