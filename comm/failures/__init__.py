"""What happens when a rank does not answer: signs of life, who is at fault, and the wait that ends in time."""
