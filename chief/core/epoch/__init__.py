"""Training in one epoch: made when the epoch begins, dropped when it ends, and nothing in it is reset.

`training` counts contributions, releases tokens and gives the shards one task after another; `answers` holds back answers that are not yet
certain. Must not know how an epoch begins: that is `recovery`.
"""
