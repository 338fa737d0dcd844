"""Training in one epoch: made when the epoch begins, dropped when it ends, and nothing in it is reset.

`training` counts contributions, releases tokens and has one thing after another done at the shards; `answers` holds back what is not yet
certain. Must not know how an epoch begins: that is `recovery`.
"""
