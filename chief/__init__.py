"""The chief: decides when a step has enough contributions, has it applied, and hands out the tokens that workers block on."""

import ps_protocol as ps_protocol  # before anything of it imports grpc: see own_polling there
