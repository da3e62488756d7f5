"""The control plane in virtual time: the services' own shells and cores over the in-memory bus and
store; programs, aggregators' memory and the machines are models."""
