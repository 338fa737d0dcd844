"""The model as all three roles have it: variables, optimizers, layouts, policies, ranges of data. Pure values that check themselves.

Knows no message, file, thread or clock. `variables` has a variable's declaration, `optimizers` the rules' arguments and formulas,
`optimizer_formulas` their numbers at each step, `layout` where a shard's bytes lie, `spec` the whole model and its placement, `policy` how
workers are coordinated, `merging` how contributions become one gradient, `data` how the training data is shared out, `expressions` the
language of formulas, `programs` formulas compiled to operations on blocks, `keys` how the keys of tables without a size are spread over
servers, `updates` new values that one gives to variables in a step, `differences` how two such values differ, `misspelling` suggestions for
misspelt names, `checksums` numbers that follow from bytes, `shown` values and sizes in messages, `light_dataclass` how all values of the
packages are declared.
"""
