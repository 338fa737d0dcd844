"""Reports: medians, tables, plots, and the page of the docs that shows them. Knows numbers; runs no process."""
