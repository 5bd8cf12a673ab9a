"""``spdl.examples``: what programs import of SPDL's examples."""
