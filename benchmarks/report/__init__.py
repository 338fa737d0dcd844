"""What figures come to: medians, tables, plots, and the page of docs that shows them. Knows numbers; runs no process."""
