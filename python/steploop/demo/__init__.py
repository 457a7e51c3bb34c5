"""`steploop demo`: the same chat prompts with continuous batching and in static batches, side by side.

`prompts` is the work, `model` finds the demo model, `measure` runs and times, `view`, `report` and `picture` show.
"""
