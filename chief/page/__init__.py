"""The chief's page for a browser, which only looks. Decides nothing, and no step waits for it.

`event_log` and `curves` keep past events and numbers, in bounded memory, and `cost` adds up what processes have used; `recorder` takes a
`look` at the cluster once a second and reads metrics; `keeper` has what the page shows of the past kept for the next chief's, as a `story`;
`feed` makes JSON of it all. `site` serves it, with `page.html` that loads nothing else.
"""
