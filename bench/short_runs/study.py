"""Which outer steps suit runs of few rounds: `python -m bench.short_runs [--output …/short_runs.json] [--plot …/short_runs.png]`.

A small transformer for characters trains with simulated ranks, which meet once in 15 steps. A cell is a number of rounds and of
ranks, weights that are new or that another text has trained, and AdamW or Muon. In each cell all outer steps begin with the
same parameters, and a rank draws the same text in all of them. What counts is the loss of the outer parameters over text that
is held back.

All is written as soon as it is measured: what is in the file is not measured again.
"""
