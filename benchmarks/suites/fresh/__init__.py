"""Fresh weights: what a step costs those who follow, and those who train.

`fresh`: the suite. `trainer`: the one who makes steps, on a language model or on many bytes. `reader`: those who follow, or read all of it.
`language`: the model. `link`: a network of a given rate and delay.
"""
