"""How the elements of an arena travel when they do not travel as they are. Pure: arrays in, bytes out; knows no message and no call.

`formats` has the table of encodings, `arena` an arena as frames, `gradients` what is carried over to the next step; `halves`, `int8` and
`top_k` have the arithmetic of one or two encodings each.
"""
