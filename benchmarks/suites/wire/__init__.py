"""What travels: `compression` of wire formats, with `training` for its bytes and accuracy; `fresh`: what followers of the weights get, with
`following` for its processes and `characters` for a model whose updates are real.
"""
