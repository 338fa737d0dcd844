"""The chief's page for a browser: what it shows, and what it lets its reader do. Decides nothing, and is never on the way of a step.

`journal` and `history` keep what happened, in bounded memory; `recorder` looks at the cluster once a second and reads metrics;
`feed` makes JSON of it.
`actions` has what changes the training. `site` puts them together and serves them, with `page.html`, which loads nothing else.
"""
