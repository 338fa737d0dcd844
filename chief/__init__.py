"""The chief: decides when a step has enough contributions, has it applied, and hands out the tokens that workers block on."""
