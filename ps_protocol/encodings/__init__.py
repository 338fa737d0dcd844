"""Encodings of the elements of an arena, for messages with fewer bytes. Pure: arrays in, bytes out; knows no message and no call.

`formats` has the table of encodings, `arena` an arena as frames, `gradients` what is carried over to the next step, `moves` how a step
moved the variables; `halves`, `integers` and `top_k` have the arithmetic of one or two encodings each.
"""
