"""The time, CPU and memory of one step.

`step`: one size; `table`: many sizes; `profile`: the parts of a step; `peers`: beside other systems; `torch_models`: in PyTorch programs.
"""
