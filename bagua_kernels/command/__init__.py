"""The console command `bagua-kernels`: the programs of this package under one name, and tables of what it has."""
