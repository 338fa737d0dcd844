"""Commands that show what a cluster does, and change nothing.

`status` has `status` and `why`; `top` shows the same live; `local` has `ls` and `page`; `recordings` has `trace` and `tensorboard`;
`health` is the probe of containers. `text` puts a status into words and `screen` into the lines of `top`: both are pure.
"""
