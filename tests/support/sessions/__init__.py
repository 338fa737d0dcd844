"""Sessions and the programs that use them: clusters in this process, the models that workers join, training loops. Asserts nothing."""
