"""How true the simulator is: one trace played live and simulated with costs that were measured."""
