"""Following the weights: whole steps, as they are made, for programs that generate, evaluate or serve.

`follower`: what a program has, and the thread that fetches. `sources`: where weights come from. `follow`: from an address to a follower.
`publisher`: weights of a program that trains by other means. `relay`: serves what it follows to others. In a store, files stand between a
cluster and its followers: `keeper` writes them, `store` reads them, `index` says what there is.
"""
