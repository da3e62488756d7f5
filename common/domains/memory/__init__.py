"""Code that lenders, devices and the simulation of remote memory share. Pure, except for the
trailer's bytes."""
