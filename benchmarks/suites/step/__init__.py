"""The time, CPU and memory of one step.

`step` at one size, `table` at many, `profile` in its parts, `peers` beside other systems, `torch_models` as a PyTorch program has it.
"""
