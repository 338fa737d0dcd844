"""The chief's page for a browser: what it shows, and the actions that it offers. Decides nothing, and no step waits for it.

`event_log` and `curves` keep past events and numbers, in bounded memory, and `cost` adds up what processes have used; `recorder` looks at
the cluster once a second and reads metrics; `feed` makes JSON of it. `actions` has what changes the training. `site` puts them together
and serves them, with `page.html`, which loads nothing else.
"""
