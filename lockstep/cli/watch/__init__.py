"""Commands that show what a cluster does, and change nothing.

`status` has `status` and `why`; `top` shows the same live; `local` has `ls` and `page`; `recordings` has `trace` and `tensorboard`;
`health` is a container's probe. `text` formats a status as text, and `screen` as the lines of `top`: both are pure.
"""
