"""How much of a training is left where a machine is lost each minute, beside other ways to go on."""
