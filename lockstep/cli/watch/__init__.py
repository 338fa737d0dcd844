"""Commands that show what a cluster does, and change nothing.

`status` has `status` and `why`; `top` shows the same live; `local` has `ls`; `recordings` has `trace` and `tensorboard`;
`health` is a container's probe. `view` has the lines of all three, and is pure.
"""
