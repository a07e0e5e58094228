"""How a process becomes a rank: the store, the secret that ranks share, and the first words on a connection."""
