"""The engines that a cluster runs in, one module each: which hosts there are, how a command gets there, how a job runs again.

`engine`: what each tells `lockstep up`, and the table of them. `slurm`: jobs of Slurm. `skypilot`: tasks of SkyPilot. `ray`: nodes of Ray,
which `ray_reach` reaches by the actors of `ray_bridge`; there, a worker's program may be a function, which `ray_program` calls. `torchrun`,
`mpi` and `ray_train` start the workers themselves, as `ranks` of one program; a `standin` stands for each. Without an engine, hosts are
reached by ssh.
"""
